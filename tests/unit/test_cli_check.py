"""`evalfleet check` exits 0 only when the curve is exactly what was expected; every doubt has a test of its own."""

from __future__ import annotations

import json

import pytest

from eval_service.cli.checking import At, Demand, judge
from eval_service.contract.results import Direction
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import Metric
from tests.support.command import Command
from tests.support.fake_service import FakeService
from tests.support.views import point

RISING = [point(0, 0.0), point(50, 0.6), point(100, 0.9)]


@pytest.fixture
def service() -> FakeService:
    return FakeService(points=list(RISING))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], service: FakeService) -> Command:
    return Command(monkeypatch, capsys, service)


def demand(threshold: float = 0.8, expect: int = 3, **changes: object) -> Demand:
    return Demand("exact_match", threshold, expect, **changes)  # type: ignore[arg-type]


def test_a_curve_that_reaches_the_threshold_at_its_last_step_passes() -> None:
    assert judge(RISING, demand()) == []


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (PointState.SKIPPED, Reason.BUSY),
        (PointState.FAILED, Reason.ERROR_RATE),
        (PointState.CANCELLED, Reason.USER),
        (PointState.CANCELLED, Reason.DRAIN_TIMEOUT),
    ],
)
def test_a_point_that_ended_without_a_result_fails_even_when_enough_are_done(state: PointState, reason: Reason) -> None:
    faults = judge([*RISING, point(75, state=state, reason=reason, detail="why")], demand())
    assert faults == [f"step 75 letters is {state} ({reason}: why)"]


@pytest.mark.parametrize("state", [PointState.RESERVED, PointState.QUEUED, PointState.RUNNING])
def test_a_point_that_has_not_ended_fails(state: PointState) -> None:
    assert judge([*RISING, point(75, state=state)], demand()) == [f"step 75 letters has not ended: it is {state}"]


def test_one_point_more_than_expected_fails() -> None:
    assert judge(RISING, demand(expect=2)) == ["3 points are done, 2 were expected"]


def test_one_point_fewer_than_expected_fails() -> None:
    assert judge(RISING, demand(expect=4)) == ["3 points are done, 4 were expected"]


def test_no_points_at_all_fails() -> None:
    assert "0 points are done, 3 were expected" in judge([], demand())


@pytest.mark.parametrize("state", [PointState.DONE, PointState.CANCELLED])
def test_a_superseded_point_counts_for_nothing(state: PointState) -> None:
    reason = Reason.SUPERSEDED if state is PointState.CANCELLED else None
    older = point(100, 0.1, id="older", state=state, reason=reason, superseded=True)
    assert judge([*RISING, older], demand()) == []


def test_a_metric_that_no_point_has_fails_and_the_known_ones_are_named() -> None:
    assert judge(RISING, Demand("f1", 0.8, 3)) == ["no done point has the metric 'f1'; there is exact_match"]


def test_a_metric_that_the_last_point_lacks_fails() -> None:
    points = [*RISING[:2], point(100, 0.9, metrics={})]
    assert judge(points, demand()) == ["step 100 letters lacks the metric 'exact_match'"]


def test_a_metric_below_the_threshold_fails() -> None:
    assert judge(RISING, demand(0.95)) == ["step 100 letters: exact_match is 0.9, wanted >= 0.95"]


def test_a_metric_that_is_not_a_number_fails_in_both_directions() -> None:
    broken = [*RISING[:2], point(100, 0.9, metrics={"exact_match": Metric(value=float("nan"), n=1)})]
    assert judge(broken, demand())
    assert judge(broken, demand(direction=Direction.MIN))


def test_min_wants_the_metric_at_or_below_the_threshold() -> None:
    assert judge(RISING, demand(0.9, direction=Direction.MIN)) == []
    assert judge(RISING, demand(0.89, direction=Direction.MIN))


def test_the_threshold_itself_is_reached() -> None:
    assert judge(RISING, demand(0.9)) == []


def test_final_asks_the_last_step_alone() -> None:
    falling = [point(0, 0.9), point(50, 0.9), point(100, 0.1)]
    assert judge(falling, demand(at=At.FINAL))


def test_any_is_content_with_one_point() -> None:
    falling = [point(0, 0.9), point(50, 0.1), point(100, 0.1)]
    assert judge(falling, demand(at=At.ANY)) == []
    assert judge(falling, demand(0.95, at=At.ANY))


def test_all_asks_every_point() -> None:
    assert len(judge(RISING, demand(0.8, at=At.ALL))) == 2


def test_a_suite_that_is_measured_otherwise_does_not_need_the_metric() -> None:
    other = [point(step, 0.5, suite="other", metrics={"f1": Metric(value=0.5, n=3)}) for step in (0, 50, 100)]
    assert judge([*RISING, *other], demand(expect=6)) == []


def test_every_suite_that_has_the_metric_must_reach_it() -> None:
    other = [point(step, 0.5, suite="other") for step in (0, 50, 100)]
    assert judge([*RISING, *other], demand(expect=6)) == ["step 100 other: exact_match is 0.5, wanted >= 0.8"]


def test_score_names_the_headline() -> None:
    assert judge(RISING, Demand("score", 0.9, 3)) == []


CHECK = ("check", "demo", "--metric", "exact_match", "--threshold", "0.8", "--expect-points", "3")


def test_the_command_exits_0_and_shows_what_it_saw(command: Command) -> None:
    ran = command(*CHECK)
    assert ran.code == 0
    assert "0.900 ± 0.020" in ran.out
    assert ran.out.endswith("ok\n")


def test_the_command_exits_1_when_a_point_was_skipped(command: Command, service: FakeService) -> None:
    service.points.append(point(150, state=PointState.SKIPPED, reason=Reason.BUSY))
    ran = command(*CHECK)
    assert ran.code == 1
    assert "FAILED: step 150 letters is skipped (busy)" in ran.out


def test_the_command_prints_its_verdict_as_json(command: Command) -> None:
    ran = command(*CHECK[:-1], "4", "--json")
    verdict = json.loads(ran.out)
    assert ran.code == 1
    assert verdict["ok"] is False
    assert verdict["faults"] == ["3 points are done, 4 were expected"]
    assert [seen["step"] for seen in verdict["points"]] == [0, 50, 100]


def test_a_service_that_is_not_there_is_no_failed_check(command: Command, service: FakeService) -> None:
    service.down = True
    assert command(*CHECK).code == 4


def test_a_suite_can_be_checked_alone(command: Command, service: FakeService) -> None:
    service.points.extend(point(step, 0.1, suite="other") for step in (0, 50, 100))
    assert command(*CHECK, "--suite", "letters").code == 0
