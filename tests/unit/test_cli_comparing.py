"""`compare`, `diff` and `export` against a service in memory: the sentence, the flips over all pages, the formats."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from eval_service.cli.exporting import COLUMNS
from eval_service.contract.curves import Beside, Curve, CurvePoint, Span
from eval_service.contract.results import (
    Alarm,
    AlarmKind,
    Compared,
    Comparison,
    Direction,
    Flip,
    Metric,
    Verdict,
)
from eval_service.contract.states import PointState, Reason
from tests.support.command import Command
from tests.support.fake_service import FakeService
from tests.support.views import point, sample


def comparison(**changes: Any) -> Comparison:
    flips = tuple(
        Flip(prompt_index=i, dataset="sort", score_a=0, score_b=1, a=sample(i, score=0.0), b=sample(i))
        for i in range(8)
    )
    values: dict[str, Any] = {
        "suite": "letters",
        "dataset": None,
        "direction": Direction.MAX,
        "a": Compared(point="p600-letters", run="demo", step=600, mean=0.5),
        "b": Compared(point="p800-letters", run="demo", step=800, mean=0.521),
        "prompts": 500,
        "only_a": 0,
        "only_b": 0,
        "neither": 0,
        "difference": 0.021,
        "stderr": 0.008,
        "low": 0.005,
        "high": 0.037,
        "p_value": 0.0123,
        "method": "mcnemar_exact",
        "verdict": Verdict.BETTER,
        "improved": 8,
        "worsened": 0,
        "flips": flips,
        "total": 8,
    }
    return Comparison(**(values | changes))


@pytest.fixture
def service() -> FakeService:
    points = [point(600, 0.5), point(800, 0.521), point(900, state=PointState.FAILED, reason=Reason.DEADLINE)]
    return FakeService(points=points, comparisons={("p600-letters", "p800-letters"): comparison()})


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], service: FakeService) -> Command:
    return Command(monkeypatch, capsys, service)


def test_a_comparison_is_a_sentence(command: Command) -> None:
    ran = command("compare", "demo", "600", "800")
    assert ran.code == 0
    assert ran.out == (
        "letters: step 800 is better than step 600: +2.1 ± 0.8 points (p=0.012); "
        "50.0 -> 52.1, 8 better, 0 worse of 500 prompts\n"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"verdict": Verdict.WORSE, "difference": -0.021}, "step 800 is worse than step 600: -2.1 ± 0.8"),
        (
            {"verdict": Verdict.UNDECIDED, "p_value": 0.5},
            "step 800 can't be told from step 600: +2.1 ± 0.8 points (p",
        ),
        ({"only_a": 3, "neither": 2}, "; left out: 3 scored only at step 600, 2 at neither"),
        (
            {"difference": None, "prompts": 0, "only_b": 4},
            "no prompt that both steps scored; left out: 4 only at",
        ),
        (
            {"a": Compared(point="p", run="demo", step=600, mean=12.5), "difference": 3.0},
            ": +3 ± 0.008 (p=0.012); 12.5",
        ),
    ],
)
def test_a_comparison_says_what_it_can(
    command: Command, service: FakeService, changes: dict[str, Any], said: str
) -> None:
    service.comparisons = {("p600-letters", "p800-letters"): comparison(**changes)}
    assert said in command("compare", "demo", "600", "800").out


def test_a_comparison_as_json_is_one_a_suite_without_the_flips(command: Command) -> None:
    (found,) = json.loads(command("compare", "demo", "600", "800", "--json", "--dataset", "sort").out)
    assert (found["p_value"], found["flips"], found["total"], found["dataset"]) == (0.0123, [], 8, "sort")


def test_diff_shows_the_flips_of_all_pages_up_to_the_limit(command: Command) -> None:
    lines = command("diff", "demo", "600", "800", "--limit", "7").out.splitlines()
    assert lines[1] == "8 prompts changed (the first 7)"
    assert len(lines) == 2 + 7
    assert lines[2] == "  wrong -> right  sort 'sort 0': 'cba' -> 'abc'  (answer 'abc')"
    assert len(json.loads(command("diff", "demo", "600", "800", "--json").out)[0]["flips"]) == 8


def test_steps_without_a_result_or_without_a_common_suite_are_told_by_name(
    command: Command, service: FakeService
) -> None:
    ran = command("compare", "demo", "600", "900")
    assert (ran.code, "no point with a result at step 900" in ran.err) == (2, True)
    service.points = [point(1, 0.5), point(2, 0.5, suite="digits")]
    ran = command("diff", "demo", "1", "2")
    assert (ran.code, "step 1 has letters, step 2 has digits" in ran.err) == (2, True)


# --- export


@pytest.fixture
def curve(service: FakeService) -> FakeService:
    metrics = {
        "exact_match": Metric(value=0.5, stderr=0.02, n=100, low=0.4, high=0.6),
        "sort/exact_match": Metric(value=0.25, n=1),
    }
    alarm = Alarm(kind=AlarmKind.EOS_NEVER, message="none ended")
    service.points[0] = point(600, 0.5, metrics=metrics, headline="exact_match", alarms=(alarm,))
    return service


def test_the_curve_as_csv_has_a_row_a_metric_and_one_for_a_point_without(command: Command, curve: FakeService) -> None:
    rows = list(csv.DictReader(io.StringIO(command("export", "demo").out)))
    assert list(rows[0]) == list(COLUMNS)
    assert [(row["step"], row["key"], row["value"]) for row in rows] == [
        ("600", "eval/letters/exact_match", "0.5"),
        ("600", "eval/letters/sort/exact_match", "0.25"),
        ("800", "eval/letters/exact_match", "0.521"),
        ("900", "", ""),
    ]
    assert (rows[0]["low"], rows[0]["headline"], rows[1]["dataset"], rows[1]["metric"]) == (
        *("0.4", "True"),
        *("sort", "exact_match"),
    )
    assert (rows[0]["alarms"], rows[0]["pin_s"], rows[3]["state"], rows[3]["reason"]) == (
        *("eos_never", "0.4"),
        *("failed", "deadline"),
    )


@pytest.mark.parametrize("form", ["csv", "json", "parquet"])
def test_a_file_of_any_format_holds_the_same_curve(
    command: Command, curve: FakeService, tmp_path: Path, form: str
) -> None:
    out = tmp_path / f"curve.{form}"
    ran = command("export", "demo", "--format", form, "--out", str(out))
    assert (ran.code, ran.out) == (0, "")
    if form == "parquet":
        rows = pq.read_table(out).to_pylist()
    elif form == "json":
        rows = json.loads(out.read_text())
    else:
        rows = list(csv.DictReader(io.StringIO(out.read_text())))
    assert [str(row["value"] or "") for row in rows] == ["0.5", "0.25", "0.521", ""]
    assert all(list(row) == list(COLUMNS) for row in rows)


def test_json_is_the_json_format_and_parquet_is_not_printed(command: Command, curve: FakeService) -> None:
    assert len(json.loads(command("export", "demo", "--json").out)) == 4
    ran = command("export", "demo", "--format", "parquet")
    assert (ran.code, "--out" in ran.err) == (2, True)
    assert command("export", "demo", "--format", "parquet", "--json").code == 2
    ran = command("export", "demo", "--out", "/nowhere/at/all.csv")
    assert (ran.code, "out: can't be written" in ran.err) == (2, True)


def test_the_curve_says_of_each_point_whether_it_is_better_and_asks_until_all_are_compared(
    command: Command, service: FakeService
) -> None:
    beside = Beside(point="p600-letters", step=600, difference=0.021, said="step 800 is better than step 600: ...")
    values = {"exact_match": Span(value=0.521, low=0.5, high=0.54)}
    done: dict[str, Any] = {"state": PointState.DONE, "reason": None, "lag_steps": 0, "alarms": ()}
    failed = done | {"state": PointState.FAILED, "reason": Reason.DEADLINE}
    points = (
        CurvePoint(id="a", step=800, values=values, beside=beside, **done),
        CurvePoint(id="b", step=900, values={}, **failed),
    )
    named: dict[str, Any] = {"run": "demo", "suite": "letters", "suites": ("letters",), "headline": "exact_match"}
    named |= {"direction": Direction.MAX, "metrics": ("exact_match",), "best": None, "against": "before"}
    service.curves = [Curve(**named, points=points, uncompared=left) for left in (7, 3, 0)]
    assert command("curve", "demo").out.splitlines() == [
        "demo letters, exact_match",
        "step  score             interval      beside",
        "800   0.521             0.500..0.540  step 800 is better than step 600: ...",
        "900   failed: deadline  -             -",
    ]
    service.curves = [Curve(**named, points=points, uncompared=3) for _ in range(2)]
    assert command("curve", "demo").out.splitlines()[-1] == "3 points are not compared yet: ask again"
    service.curves = [Curve(**named, points=points)]
    assert json.loads(command("curve", "demo", "--json").out)["points"][0]["beside"]["step"] == 600
