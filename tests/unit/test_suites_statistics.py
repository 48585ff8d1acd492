"""Means and errors: errored apart from wrong, and nothing said where nothing is known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval_service.contract.wire import SampleView
from eval_service.suites.statistics import aggregate, mean_of
from eval_service.suites.suite import Suite, load_suites


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "p", "answer": "x"}\n')
    (tmp_path / "suites.toml").write_text(
        '[suites.s]\ndatasets = [{name = "a", path = "a.jsonl"}, {name = "b", path = "b.jsonl"}]\n'
    )
    return load_suites(tmp_path / "suites.toml")["s"]


def _sample(index: int, dataset: str, score: float | None, **changes: Any) -> SampleView:
    values = {
        "index": index,
        "prompt_index": index,
        "dataset": dataset,
        "prompt": "p",
        "answer": "x",
        "output": "x",
        "score": score,
        "error": None if score is not None else "no",
        "finish_reason": "stop",
        "prompt_tokens": 1,
        "output_tokens": 1,
        "engine": "e",
        "weight_version": "v",
        "latency_s": 0.1,
    }
    return SampleView.model_validate({**values, **changes})


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50))
def test_mean_and_standard_error_agree_with_numpy(values: list[float]) -> None:
    metric = mean_of(values)
    assert metric is not None
    assert metric.stderr is not None
    assert math.isclose(metric.value, numpy.mean(values), rel_tol=1e-9, abs_tol=1e-6)
    expected = numpy.std(values, ddof=1) / math.sqrt(len(values))
    assert math.isclose(metric.stderr, expected, rel_tol=1e-6, abs_tol=1e-6)


def test_below_two_values_there_is_no_standard_error_and_without_any_no_metric() -> None:
    one = mean_of([1.0])
    assert one is not None
    assert (one.value, one.stderr, one.n) == (1.0, None, 1)
    assert mean_of([]) is None


def test_an_errored_sample_is_not_a_wrong_one(suite: Suite) -> None:
    samples = [_sample(i, "a", 1.0) for i in range(3)] + [_sample(3, "a", None, finish_reason=None)]
    found = aggregate(suite, samples)
    assert (found.score, found.headline, found.error_rate) == (1.0, "exact_match", 0.25)
    assert (found.metrics["exact_match"].n, found.metrics["error_rate"].n) == (3, 4)
    assert "b/exact_match" not in found.metrics


def test_datasets_are_told_apart_and_the_headline_is_over_all(suite: Suite) -> None:
    samples = [_sample(0, "a", 1.0), _sample(1, "a", 1.0), _sample(2, "b", 0.0), _sample(3, "b", 1.0)]
    found = aggregate(suite, samples)
    assert {name: metric.value for name, metric in found.metrics.items()} == {
        "exact_match": 0.75,
        "a/exact_match": 1.0,
        "b/exact_match": 0.5,
        "error_rate": 0.0,
        "truncated": 0.0,
        "empty": 0.0,
        "unparsed": 0.0,
    }
    assert found.stderr == pytest.approx(0.25)


def test_truncated_and_empty_are_shares_of_what_was_answered(suite: Suite) -> None:
    samples = [
        _sample(0, "a", 0.0, finish_reason="length"),
        _sample(1, "a", 0.0, output=" \n"),
        _sample(2, "a", None, finish_reason=None, output=""),
    ]
    metrics = aggregate(suite, samples).metrics
    assert (metrics["truncated"].value, metrics["empty"].value, metrics["empty"].n) == (0.5, 0.5, 2)


def test_where_nothing_could_be_scored_there_is_no_score(suite: Suite) -> None:
    found = aggregate(suite, [_sample(0, "a", None)])
    assert (found.score, found.stderr, found.error_rate) == (None, None, 1.0)
    assert aggregate(suite, []).metrics == {}
