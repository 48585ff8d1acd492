"""The demo's kill comes in the middle of a point, once, and only to a process of its own."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

from eval_service.contract.states import PointState
from eval_service.contract.wire import EngineState, EngineView, FleetView, GroupView, PointView
from eval_service.demo.kill import STOPPED_S, EngineKiller, proof
from tests.support.views import engine, point, sample

DONE = [point(0, 0.0), point(25, 0.1), point(50, 0.1)]
RUNNING = point(100, state=PointState.RUNNING)
OVER = point(100, 0.5)
BUSY = engine("eval-1", point=RUNNING.id, in_flight=5)
IDLE = engine("eval-1", point=RUNNING.id, in_flight=0)
OTHER = engine("eval-2", server_pid=4343)
STOP, GO_ON = [(4343, signal.SIGSTOP), (4242, signal.SIGSTOP)], [(4343, signal.SIGCONT), (4242, signal.SIGCONT)]
KILL = [(4242, signal.SIGKILL), *GO_ON]


class Stage:
    """A killer, its clock, what it sees, and the signals that it would have sent."""

    def __init__(self, *, owns: bool = True) -> None:
        self.sent: list[tuple[int, int]] = []
        self.now = 100.0
        self.killer = EngineKiller(
            owns=lambda _: owns,
            clock=lambda: self.now,
            signal_process=lambda pid, number: self.sent.append((pid, number)),
        )

    def _state(self, _: str) -> str:
        return "running" if self.sent[-1] == (4242, signal.SIGKILL) else "done, for the others went on"

    def look(
        self, engines: Sequence[EngineView], points: Sequence[PointView] = (*DONE, RUNNING), *, age_s: float = 0.0
    ) -> None:
        group = GroupView(name="eval", kind="pinned", grade="fake", desired=2, ready=2, engines=tuple(engines))
        view = FleetView(groups=(group,), seen_at=self.now - age_s)
        self.killer.consider(points, lambda: view, self._state)
        self.now += 1.0


def test_engines_are_stopped_and_one_that_is_seen_with_requests_in_flight_is_killed() -> None:
    stage = Stage()
    stage.look([OTHER, BUSY])
    assert stage.sent == STOP
    for _ in range(2):
        stage.look([OTHER, BUSY])
    assert stage.sent == [*STOP, *KILL]
    assert stage.killer.kill is not None
    assert (stage.killer.kill.engine, stage.killer.kill.step, stage.killer.kill.in_flight) == ("eval-1", 100, 5)
    assert stage.killer.kill.point_state_after == "running"


def test_a_point_too_short_for_the_view_to_show_is_caught() -> None:
    """The view is from before the point, as it always is where a point takes less than the view's second."""
    stage = Stage()
    stage.look([OTHER, engine("eval-1")], age_s=0.9)
    assert stage.sent == STOP
    stage.look([OTHER, BUSY], age_s=1.0)
    assert stage.sent == STOP, "a view from before the stop says nothing of it"
    stage.look([OTHER, BUSY], age_s=0.2)
    stage.look([OTHER, BUSY], age_s=1.2)
    assert stage.sent == STOP, "it is the same view"
    stage.look([OTHER, BUSY], age_s=0.2)
    assert stage.sent == [*STOP, *KILL]


def test_a_view_that_was_on_its_way_when_the_engines_were_stopped_kills_none_however_late_it_is_written() -> None:
    """It shows requests that were answered before the stop."""
    stage = Stage()
    stage.look([OTHER, IDLE])
    stage.look([OTHER, BUSY])
    assert stage.sent == STOP
    stage.look([engine("eval-2", server_pid=4343, point=RUNNING.id, in_flight=3), IDLE])
    assert stage.sent == [*STOP, (4343, signal.SIGKILL), *GO_ON]


def test_the_engine_whose_pin_is_still_under_way_is_no_matter_where_the_other_one_is_at_work() -> None:
    stage = Stage()
    stage.look([OTHER, IDLE])
    for _ in range(2):
        stage.look([engine("eval-2", server_pid=4343, point=RUNNING.id, in_flight=3), IDLE])
    assert stage.sent == [*STOP, (4343, signal.SIGKILL), *GO_ON]


def test_it_is_killed_once() -> None:
    stage = Stage()
    for _ in range(5):
        stage.look([OTHER, BUSY])
    assert stage.sent == [*STOP, *KILL]


@pytest.mark.parametrize(
    ("engines", "points"),
    [
        pytest.param([OTHER, IDLE], [*DONE, RUNNING], id="it has nothing in flight"),
        pytest.param([OTHER, engine("eval-1", in_flight=5)], [*DONE, RUNNING], id="it is not the point's"),
        pytest.param([OTHER], [*DONE, RUNNING], id="it is gone"),
        pytest.param([OTHER, BUSY], [*DONE, OVER], id="the point is over"),
    ],
)
def test_what_was_stopped_in_vain_goes_on_and_the_next_point_is_tried(
    engines: Sequence[EngineView], points: Sequence[PointView]
) -> None:
    stage = Stage()
    stage.look([OTHER, BUSY])
    for _ in range(2):
        stage.look(engines, points)
    assert stage.sent == [*STOP, *GO_ON]
    for _ in range(3):
        stage.look([OTHER, BUSY])
    assert stage.sent == [*STOP, *GO_ON, *STOP, *KILL]


def test_it_is_not_stopped_for_long_where_the_view_is_not_written() -> None:
    stage = Stage()
    stage.look([OTHER, BUSY])
    stage.now += STOPPED_S
    stage.look([OTHER, BUSY], age_s=60.0)
    assert stage.sent == [*STOP, *GO_ON]


def test_an_engine_that_is_stopped_goes_on_when_the_watching_ends() -> None:
    stage = Stage()
    stage.look([OTHER, BUSY])
    stage.killer.let_go()
    stage.killer.let_go()
    assert stage.sent == [*STOP, *GO_ON]


def test_not_before_three_points_are_done() -> None:
    stage = Stage()
    stage.look([OTHER, BUSY], [*DONE[1:], RUNNING])
    assert stage.sent == []


def test_not_while_no_point_is_running() -> None:
    stage = Stage()
    stage.look([OTHER, BUSY], [*DONE, point(100, state=PointState.PINNING)])
    assert stage.sent == []


def test_not_the_last_engine_that_is_ready() -> None:
    stage = Stage()
    stage.look([engine("eval-2", state=EngineState.STARTING), BUSY])
    assert stage.sent == []


def test_never_a_process_that_is_not_the_demos() -> None:
    stage = Stage(owns=False)
    stage.look([OTHER, BUSY])
    assert stage.sent == []


def test_the_proof_counts_samples_by_engine() -> None:
    stage = Stage()
    for _ in range(3):
        stage.look([OTHER, BUSY])
    assert stage.killer.kill is not None
    samples = [sample(0), sample(1, engine="eval-2"), sample(2, engine="eval-2")]
    shown = proof(stage.killer.kill, point(100, 0.5, attempts=2), samples, expected=3)
    assert shown["samples_by_engine"] == {"eval-1": 1, "eval-2": 2}
    assert shown["samples_from_others"] == 2
    assert (shown["samples"], shown["samples_expected"], shown["attempts"]) == (3, 3, 2)
