"""The demo's kill comes in the middle of a point, once, and only to a process of its own."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from eval_service.contract.states import PointState
from eval_service.contract.wire import EngineState, EngineView, PointView
from eval_service.demo.kill import EngineKiller, proof
from tests.support.views import engine, point, sample

DONE = [point(0, 0.0), point(25, 0.1), point(50, 0.1)]
RUNNING = point(100, state=PointState.RUNNING)
BUSY = engine("eval-1", point=RUNNING.id, in_flight=5)
OTHER = engine("eval-2", server_pid=4343)


class Signals(list[tuple[int, int]]):
    """Records what would have been sent."""

    def __call__(self, pid: int, number: int) -> None:
        self.append((pid, number))


def considered(
    points: Sequence[PointView], engines: Sequence[EngineView], *, owns: bool = True
) -> tuple[EngineKiller, Signals]:
    signals = Signals()
    killer = EngineKiller(owns=lambda _: owns, clock=lambda: 7.0, signal_process=signals)
    killer.consider(points, lambda: list(engines), lambda _: "running")
    return killer, signals


def test_an_engine_with_requests_in_flight_is_killed() -> None:
    killer, signals = considered([*DONE, RUNNING], [OTHER, BUSY])
    assert signals == [(4242, signal.SIGKILL)]
    assert killer.kill is not None
    assert (killer.kill.engine, killer.kill.step, killer.kill.in_flight) == ("eval-1", 100, 5)


def test_it_is_killed_once() -> None:
    killer, signals = considered([*DONE, RUNNING], [OTHER, BUSY])
    killer.consider([*DONE, RUNNING], lambda: [OTHER, BUSY], lambda _: "running")
    assert len(signals) == 1


def test_not_before_three_points_are_done() -> None:
    assert considered([*DONE[1:], RUNNING], [OTHER, BUSY])[1] == []


def test_not_while_no_point_is_running() -> None:
    assert considered([*DONE, point(100, state=PointState.PINNING)], [OTHER, BUSY])[1] == []


def test_not_an_idle_engine() -> None:
    assert considered([*DONE, RUNNING], [OTHER, engine("eval-1", point=RUNNING.id, in_flight=0)])[1] == []


def test_not_the_last_engine_that_is_ready() -> None:
    starting = engine("eval-2", state=EngineState.STARTING)
    assert considered([*DONE, RUNNING], [starting, BUSY])[1] == []


def test_never_a_process_that_is_not_the_demos() -> None:
    assert considered([*DONE, RUNNING], [OTHER, BUSY], owns=False)[1] == []


def test_the_proof_counts_samples_by_engine() -> None:
    killer, _ = considered([*DONE, RUNNING], [OTHER, BUSY])
    assert killer.kill is not None
    samples = [sample(0), sample(1, engine="eval-2"), sample(2, engine="eval-2")]
    shown = proof(killer.kill, point(100, 0.5, attempts=2), samples, expected=3)
    assert shown["samples_by_engine"] == {"eval-1": 1, "eval-2": 2}
    assert shown["samples_from_others"] == 2
    assert (shown["samples"], shown["samples_expected"], shown["attempts"]) == (3, 3, 2)
