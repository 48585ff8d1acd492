"""Following a run: each ended point is told once, and a failed trainer or service ends the demo."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import FleetView, GroupView
from eval_service.demo.follow import Follower
from eval_service.demo.kill import EngineKiller
from eval_service.demo.processes import Child, DemoError
from tests.support.fake_service import FakeService
from tests.support.views import engine, point

Start = Callable[[str, str], Child]
WAITS = "import sys; sys.stdin.read()"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts Python code as a child; one that waits is ended when the test is over."""
    with ExitStack() as stack:

        def child(name: str, code: str) -> Child:
            with (tmp_path / name).open("wb") as log:
                process = stack.enter_context(
                    subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=log, stderr=log)
                )
            stack.callback(process.kill)
            return Child(name, process, tmp_path / name)

        yield child


class Watched:
    """A follower, what it said and how far it was."""

    def __init__(self, service: FakeService, killer: EngineKiller | None = None) -> None:
        self.said: list[str] = []
        self.progress: list[tuple[float, float]] = []
        self.follower = Follower(
            client=service.connect("http://service"),
            say=self.said.append,
            killer=killer,
            advance=lambda done, total: self.progress.append((done, total)),
            planned=9,
        )


def test_each_point_that_ends_is_told_once() -> None:
    service = FakeService(points=[point(0, 0.25), point(50)])
    watched = Watched(service)
    watched.follower.look()
    service.points[1] = point(50, state=PointState.SKIPPED, reason=Reason.BUSY, lag_steps=None)
    watched.follower.look()
    watched.follower.look()
    assert watched.said[0] == "step    0  0.250 ± 0.020  lag 7  stall 0.1  queue 0.3  pin 0.4  generate 0.5 s"
    assert watched.said[1:] == ["step   50  skipped (busy)"]
    assert watched.progress == [(1, 9), (2, 9), (2, 9)]


def test_a_service_that_does_not_answer_for_a_while_is_looked_at_again() -> None:
    service = FakeService(points=[point(0, 0.25)], down=True)
    watched = Watched(service)
    watched.follower.look()
    assert watched.said == []
    service.down = False
    watched.follower.look()
    assert len(watched.said) == 1


def test_the_engine_is_killed_and_it_is_said() -> None:
    running = point(100, state=PointState.RUNNING)
    engines = (engine("eval-1", point=running.id, in_flight=5), engine("eval-2"))
    group = GroupView(name="eval", kind="pinned", grade="fake", desired=2, ready=2, engines=engines)
    points = [point(0, 0.0), point(25, 0.1), point(50, 0.2), running]
    service = FakeService(points=points, fleet=FleetView(groups=(group,), seen_at=1.0))
    killer = EngineKiller(owns=lambda _: True, clock=lambda: 7.0, signal_process=lambda *_: None)
    watched = Watched(service, killer)
    watched.follower.look()
    for seen_at in (8.0, 9.0):
        service.fleet = FleetView(groups=(group,), seen_at=seen_at)
        watched.follower.look()
    assert watched.said[-1] == "killed engine eval-1 (pid 4242) with 5 requests of step 100 in flight"
    assert killer.kill is not None
    assert killer.kill.point_state_after == "running"


def test_the_run_is_followed_until_the_trainer_ends(start: Start) -> None:
    watched = Watched(FakeService(points=[point(0, 0.25)]))
    watched.follower.follow(start("trainer", ""), start("service", WAITS), timeout_s=30)
    assert len(watched.said) == 1


def test_a_trainer_that_fails_ends_the_demo_with_its_last_words(start: Start) -> None:
    trainer = start("trainer", "raise SystemExit('out of data')")
    with pytest.raises(DemoError, match=r"trainer ended with code 1; .*\nout of data"):
        Watched(FakeService()).follower.follow(trainer, start("service", WAITS), timeout_s=30)


def test_a_service_that_dies_ends_the_demo(start: Start) -> None:
    service = start("service", "")
    assert service.wait(30)
    with pytest.raises(DemoError, match="service ended with code 0"):
        Watched(FakeService()).follower.follow(start("trainer", WAITS), service, timeout_s=30)


def test_a_trainer_that_does_not_end_is_not_waited_for_for_ever(start: Start) -> None:
    with pytest.raises(DemoError, match="trainer has not ended"):
        Watched(FakeService()).follower.follow(start("trainer", WAITS), start("service", WAITS), timeout_s=0.1)
