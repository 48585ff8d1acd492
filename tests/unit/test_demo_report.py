"""The demo's own assertions, its report and its pictures."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import Metric
from eval_service.demo import plots, traces
from eval_service.demo.plan import Plan
from eval_service.demo.report import Findings, checks, closing_text, report, some
from tests.support.views import engine, point, receipt, sample

PLAN = Plan(num_steps=50, interval=10)
SCORES = (0.0, 0.2, 0.5, 0.7, 0.9, 0.95)
KILL: dict[str, Any] = {
    "engine": "eval-1",
    "step": 20,
    "in_flight": 4,
    "point_state_after": "running",
    "point_state": "done",
    "samples": 10,
    "samples_expected": 10,
    "samples_with_error": 0,
    "samples_from_others": 6,
    "weight_versions": ["00000000.1"],
    "weight_version_pinned": "00000000.1",
    "attempts": 1,
}


def metrics(score: float) -> dict[str, Metric]:
    return {name: Metric(value=score, stderr=0.1, n=10) for name in ("exact_match", "sort/exact_match")}


def findings(**changes: Any) -> Findings:
    points = [point(10 * index, score, metrics=metrics(score)) for index, score in enumerate(SCORES)]
    values: dict[str, Any] = {
        "points": points,
        "first_samples": [sample(0, 0.0)],
        "last_samples": [sample(0)],
        "receipt": receipt(),
        "trained_until": 1045.0,
        "kill": KILL,
        "kill_wanted": True,
        "disjoint": 10,
        "engines": [engine("eval-1", restarts=1)],
        "kept": ["step_40-0123abcd", "step_50-0123abcd"],
        "left_behind": [],
        "timings": {"total_s": 12.34567},
    }
    return Findings(**(values | changes))


def failed(found: Findings) -> list[str]:
    return [check.name for check in checks(found, PLAN) if not check.ok]


def test_a_demo_that_went_well_passes_every_check() -> None:
    assert failed(findings()) == []


def test_without_a_kill_wanted_none_is_asked_for() -> None:
    assert failed(findings(kill=None, kill_wanted=False)) == []


def test_overlap_counts_points_that_ended_before_the_last_step_was_trained() -> None:
    assert findings().overlap == 5
    assert findings(trained_until=None).overlap == 0


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"trained_until": 1015.0}, "overlap >= 3"),
        ({"disjoint": 0}, "no eval prompt is trained on"),
        ({"receipt": None}, "drained"),
        ({"receipt": receipt(drained=False, timed_out=True)}, "drained"),
        ({"left_behind": ["port 8700"]}, "nothing is left behind"),
        ({"kill": None}, "an engine was killed and nothing was lost"),
        ({"kill": KILL | {"point_state_after": "done"}}, "an engine was killed and nothing was lost"),
        ({"kill": KILL | {"samples": 9}}, "an engine was killed and nothing was lost"),
        ({"kill": KILL | {"samples_from_others": 0}}, "an engine was killed and nothing was lost"),
        ({"kill": KILL | {"samples_with_error": 1}}, "an engine was killed and nothing was lost"),
        ({"kill": KILL | {"weight_versions": ["00000000.1", "older"]}}, "an engine was killed and nothing was lost"),
        ({"kill": KILL | {"point_state": "failed"}}, "an engine was killed and nothing was lost"),
    ],
)
def test_each_broken_promise_is_named(changes: dict[str, Any], name: str) -> None:
    assert failed(findings(**changes)) == [name]


def test_a_model_that_knew_it_before_or_never_learnt_it_fails() -> None:
    flat = [replace_score(found, 0.5) for found in findings().points]
    assert failed(findings(points=flat)) == ["step 0 scores <= 0.2", "the end scores >= 0.8"]


def test_a_point_that_is_not_done_fails() -> None:
    points = [*findings().points[:-1], point(50, state=PointState.SKIPPED, reason=Reason.BUSY)]
    assert "at least 6 points, all done" in failed(findings(points=points))


def test_the_report_holds_what_its_readers_look_for() -> None:
    found = findings()
    content = report(found, PLAN, checks(found, PLAN))
    assert json.loads(json.dumps(content)) == content
    assert content["ok"] is True
    fields = "step state score stderr lag_steps stall_s export_s pin_s generate_s queue_s attempts metrics"
    assert set(fields.split()) <= set(content["points"][0])
    assert content["overlap"] == 5
    assert content["drain"]["drained"] is True
    assert content["timings"] == {"total_s": 12.346}
    assert {"python", "sglang", "ray", "torch"} <= set(content["versions"])


def test_the_closing_text_shows_table_samples_overlap_and_verdicts() -> None:
    found = findings()
    text = closing_text(found, checks(found, PLAN))
    assert "0.950 ± 0.020" in text
    assert "wrong  'sort 0' -> 'cba'" in text
    assert "5 of 6 points ended before training did" in text
    assert "6 from other engines" in text
    assert "FAILED" not in text


def test_three_samples_are_shown_and_of_different_datasets_if_there_are() -> None:
    samples = [sample(0), sample(1), sample(2, dataset="upper"), sample(3, dataset="reverse"), sample(4)]
    assert [found.index for found in some(samples)] == [0, 2, 3]
    assert [found.index for found in some(samples[:2])] == [0, 1]
    assert len(some([sample(index) for index in range(9)])) == 3


def test_the_picture_is_well_formed_and_says_where_the_engine_was_killed() -> None:
    series = plots.series_of(findings().points, "exact_match")
    assert [line.name for line in series] == ["exact_match", "sort/exact_match"]
    root = ElementTree.fromstring(plots.svg(series, killed_at=20))
    texts = [node.text for node in root.iter("text")]
    assert "an engine killed here" in texts
    assert len(list(root.iter("polyline"))) == 2


def test_both_files_are_written_and_the_page_needs_no_other(tmp_path: Path) -> None:
    found = findings()
    series = plots.series_of(found.points, "exact_match")
    plots.write_png(tmp_path / "curve.png", series, 20)
    plots.write_html(tmp_path / "curve.html", series, found.points, None)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "curve.html").read_text()
    assert "prefers-color-scheme: dark" in page
    assert "<td>0.950</td>" in page
    assert "http" not in page
    assert "src=" not in page


def test_training_ended_with_the_last_whole_step_of_the_log(tmp_path: Path) -> None:
    lines = [
        {"time": 1.0, "event": "step_end", "step": 1},
        {"time": 2.0, "event": "step_end"},
        {"time": 9.0, "event": "x"},
    ]
    (tmp_path / traces.STEP_LOG).write_text("\n".join(map(json.dumps, lines)) + '\n{"time": 10, "ev')
    assert traces.trained_until(tmp_path) == 2.0
    assert traces.trained_until(tmp_path / "nowhere") is None


def test_the_trainers_receipt_is_read_where_there_is_one(tmp_path: Path) -> None:
    assert traces.receipt(tmp_path) is None
    (tmp_path / "receipt.json").write_text(receipt().model_dump_json())
    assert traces.receipt(tmp_path) == receipt()


def replace_score(found: Any, score: float) -> Any:
    return found.model_copy(update={"score": score})
