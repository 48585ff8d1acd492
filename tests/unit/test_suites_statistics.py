"""Means and errors: errored apart from wrong, and nothing said where nothing is known."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import scipy.stats
import statsmodels.api
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.stats.proportion import confint_proportions_2indep, proportion_confint

from eval_service.contract.results import Metric
from eval_service.contract.wire import SampleView
from eval_service.suites.statistics import aggregate, chance_of_all, chance_of_any, mean_of, weighted_mean
from eval_service.suites.suite import Suite, load_suites


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "p", "answer": "x"}\n')
    (tmp_path / "suites.toml").write_text(
        '[suites.s]\ndatasets = [{name = "a", path = "a.jsonl"}, {name = "b", path = "b.jsonl"}]\n'
    )
    found = load_suites(tmp_path / "suites.toml")["s"]
    assert isinstance(found, Suite)
    return found


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


# --- several samples a prompt, against statsmodels and closed forms


def _grouped(scores: list[list[float]]) -> tuple[list[float], list[int]]:
    values = [score for own in scores for score in own]
    return values, [prompt for prompt, own in enumerate(scores) for _ in own]


grouped_scores = st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=6), min_size=2, max_size=30).map(_grouped)


@settings(deadline=None)
@given(grouped_scores)
def test_the_standard_error_clustered_by_prompt_is_statsmodels(given_scores: tuple[list[float], list[int]]) -> None:
    values, prompts = given_scores
    metric = mean_of(values, prompts)
    assert metric is not None
    assert metric.stderr is not None
    ones = numpy.ones((len(values), 1))
    fit = statsmodels.api.OLS(values, ones).fit(cov_type="cluster", cov_kwds={"groups": numpy.array(prompts)})
    assert math.isclose(metric.value, fit.params[0], rel_tol=1e-9, abs_tol=1e-9)
    assert math.isclose(metric.stderr, fit.bse[0], rel_tol=1e-6, abs_tol=1e-9)


@settings(deadline=None)
@given(st.lists(st.floats(2, 1e3), min_size=2, max_size=40))
def test_the_interval_of_graded_scores_is_students(values: list[float]) -> None:
    metric = mean_of(values)
    assert metric is not None
    if metric.stderr == 0.0:
        assert (metric.low, metric.high) == (metric.value, metric.value)
        return
    low, high = scipy.stats.t.interval(0.95, len(values) - 1, numpy.mean(values), scipy.stats.sem(values))
    assert [metric.low, metric.high] == pytest.approx([low, high], rel=1e-6)


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_the_interval_of_right_or_wrong_is_wilsons_also_where_all_are_right(right: list[bool]) -> None:
    metric = mean_of([float(value) for value in right])
    assert metric is not None
    assert metric.low is not None
    assert metric.high is not None
    expected = proportion_confint(sum(right), len(right), method="wilson")
    assert (metric.low, metric.high) == pytest.approx(expected, abs=1e-12)
    assert metric.low < metric.high, "not even a hundred right answers are certainty"


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=5), min_size=1, max_size=20).map(_grouped))
def test_no_interval_of_shares_leaves_what_shares_can_be(given_scores: tuple[list[float], list[int]]) -> None:
    metric = mean_of(*given_scores)
    assert metric is not None
    if metric.low is not None and metric.high is not None:
        assert 0.0 <= metric.low <= metric.value <= metric.high <= 1.0


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1e-9, 123.456])
def test_equal_scores_have_exactly_that_mean_and_no_error(value: float) -> None:
    metric = mean_of([value] * 7)
    assert metric is not None
    assert (metric.value, metric.stderr) == (value, 0.0)
    clustered = mean_of([value] * 6, [0, 0, 1, 1, 2, 2])
    assert clustered is not None
    assert (clustered.value, clustered.stderr, clustered.prompts) == (value, 0.0, 3)


def test_samples_of_one_prompt_say_nothing_of_other_prompts() -> None:
    metric = mean_of([1.0, 0.0, 1.0, 1.0], [0, 0, 0, 0])
    assert metric is not None
    assert (metric.value, metric.stderr, metric.low, metric.high, metric.prompts) == (0.75, None, None, None, 1)


def test_a_right_answer_sampled_often_is_not_many_right_answers() -> None:
    few = mean_of([1.0] * 10)
    often = mean_of([1.0] * 80, [prompt for prompt in range(10) for _ in range(8)])
    assert few is not None
    assert often is not None
    assert (often.low, often.high) == (few.low, few.high)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_and_pass_all_are_what_drawing_k_of_n_comes_to(n: int) -> None:
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([1] * right + [0] * (n - right), k))
        assert chance_of_any(n, right, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-15)
        assert chance_of_all(n, right, k) == pytest.approx(sum(map(all, draws)) / len(draws), abs=1e-15)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_pass_at_k_is_unbiased(k: int) -> None:
    """Its expectation over all outcomes is the chance itself."""
    n, p = 8, 0.3
    chances = [scipy.stats.binom.pmf(right, n, p) for right in range(n + 1)]
    assert math.fsum(c * chance_of_any(n, r, k) for r, c in enumerate(chances)) == pytest.approx(1 - (1 - p) ** k)
    assert math.fsum(c * chance_of_all(n, r, k) for r, c in enumerate(chances)) == pytest.approx(p**k)


def test_pass_at_k_of_huge_numbers_neither_overflows_nor_loses_digits() -> None:
    assert chance_of_any(1024, 1, 512) == pytest.approx(0.5)
    assert chance_of_any(1024, 1024, 1024) == 1.0
    assert chance_of_all(1024, 1023, 1024) == 0.0


@pytest.fixture
def sampled(tmp_path: Path) -> Suite:
    (tmp_path / "a.jsonl").write_text('{"prompt": "p", "answer": "x"}\n' * 3)
    (tmp_path / "suites.toml").write_text(
        '[suites.s]\ndatasets = [{name = "a", path = "a.jsonl"}]\nsampling = {n = 4, temperature = 1.0}\n'
        'metric = "pass@4"\n'
    )
    found = load_suites(tmp_path / "suites.toml")["s"]
    assert isinstance(found, Suite)
    return found


def _drawn(scores: list[list[float | None]]) -> list[SampleView]:
    rows = [(prompt, sample, score) for prompt, own in enumerate(scores) for sample, score in enumerate(own)]
    return [_sample(p * 4 + s, "a", score, prompt_index=p, sample_index=s) for p, s, score in rows]


def test_several_samples_a_prompt_have_pass_at_k_pass_all_and_avg(sampled: Suite) -> None:
    found = aggregate(sampled, _drawn([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]))
    values = {name: metric.value for name, metric in found.metrics.items() if "/" not in name}
    assert values["exact_match"] == values["pass@1"] == values["avg@4"] == pytest.approx(5 / 12)
    assert [values["pass@2"], values["pass@4"]] == pytest.approx([1.5 / 3, 2 / 3])
    assert [values["pass^2"], values["pass^4"]] == pytest.approx([1 / 3, 1 / 3])
    assert found.score == values["pass@4"], "it is the headline"
    assert found.metrics["exact_match"].prompts == found.metrics["pass@4"].n == 3
    assert found.metrics["exact_match"].stderr == pytest.approx(found.metrics["avg@4"].stderr)
    assert set(sampled.config.metrics) == set(found.metrics) - {"error_rate", "truncated", "empty", "unparsed"}


def test_a_prompt_with_errored_samples_is_in_no_pass_at_k_that_it_has_too_few_for(sampled: Suite) -> None:
    metrics = aggregate(sampled, _drawn([[1, 1, 1, 1], [0, None, None, 0], [None, None, None, None]])).metrics
    assert (metrics["pass@4"].value, metrics["pass@4"].n) == (1.0, 1)
    assert (metrics["pass@2"].value, metrics["pass@2"].n) == (0.5, 2)
    assert (metrics["exact_match"].n, metrics["avg@4"].n) == (6, 2)


def test_where_all_samples_errored_there_is_an_error_rate_and_nothing_else(sampled: Suite) -> None:
    samples = [s.model_copy(update={"finish_reason": None}) for s in _drawn([[None] * 4, [None] * 4])]
    found = aggregate(sampled, samples)
    assert (set(found.metrics), found.score, found.error_rate) == ({"error_rate"}, None, 1.0)


def test_an_answer_that_no_extractor_finds_is_told_apart_from_a_wrong_one(suite: Suite) -> None:
    samples = [_sample(0, "a", 0.0, unparsed=True), _sample(1, "a", 0.0), _sample(2, "a", 1.0), _sample(3, "a", 1.0)]
    metrics = aggregate(suite, samples).metrics
    assert (metrics["unparsed"].value, metrics["exact_match"].value) == (0.25, 0.5)


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.lists(st.floats(0, 1), min_size=2, max_size=20)), min_size=1, max_size=4)
)
def test_weighted_datasets_have_the_mean_and_error_of_independent_parts(parts: list[tuple[float, list[float]]]) -> None:
    weights = {str(i): weight for i, (weight, _) in enumerate(parts)}
    found = weighted_mean({str(i): mean_of(values) for i, (_, values) in enumerate(parts)}, weights)
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    shares = numpy.array([weight for weight, _ in parts]) / sum(weights.values())
    errors = numpy.array([numpy.std(values, ddof=1) / math.sqrt(len(values)) for _, values in parts])
    assert found.value == pytest.approx(float(shares @ numpy.array([numpy.mean(values) for _, values in parts])))
    assert found.stderr == pytest.approx(float(numpy.linalg.norm(shares * errors)), abs=1e-9)
    assert found.low <= found.value + 1e-12
    assert found.high >= found.value - 1e-12


@given(st.tuples(st.integers(0, 40), st.integers(40, 60)), st.tuples(st.integers(0, 40), st.integers(40, 60)))
def test_the_interval_of_weighted_shares_is_newcombes(one: tuple[int, int], other: tuple[int, int]) -> None:
    """Half of a share and half of another's rest are half of their difference, and a half."""
    shares = {"one": _share(*one), "rest": _share(other[1] - other[0], other[1])}
    found = weighted_mean(shares, {"one": 3.0, "rest": 3.0})
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    theirs = confint_proportions_2indep(*one, *other, compare="diff", method="newcomb", correction=False)
    assert (2 * found.low - 1, 2 * found.high - 1) == pytest.approx(theirs, abs=1e-9)
    assert 0.0 <= found.low < found.high <= 1.0


def _share(right: int, n: int) -> Metric | None:
    return mean_of([1.0] * right + [0.0] * (n - right))


def test_a_weighted_mean_of_a_dataset_that_is_not_known_is_not_known() -> None:
    assert weighted_mean({"a": mean_of([1.0]), "b": None}, {"a": 1.0, "b": 2.0}) is None
