"""Kills on real parts: whatever dies, every point ends once, with its samples, and nothing is left over."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from contextlib import suppress
from typing import Self

import psutil
import pytest

from eval_service.contract.client import EvalClient
from eval_service.contract.errors import EvalfleetError
from eval_service.contract.wire import DispatchRequest, PointView, RunSpec
from tests.support.live import SUITE, Live, wait_for
from tests.support.work import Work

pytestmark = [pytest.mark.real, pytest.mark.destructive, pytest.mark.timeout(400)]


def _stopped_while_running(work: Work) -> tuple[psutil.Process, PointView]:
    """The controller, stopped while a point runs, which no other can end."""

    def look() -> tuple[psutil.Process, PointView] | None:
        if work.running() is None:
            return None
        with suppress(psutil.NoSuchProcess):
            controller = work.live.replica("controller")
            controller.suspend()
            if (point := work.running()) is not None:
                return controller, point
            controller.resume()
        return None

    return work.until(look, "a point to run")


def test_an_engine_killed_in_mid_point_costs_no_sample_and_comes_back(live: Live) -> None:
    live.wait_engines()
    work = Work(live, "kill-engine", "slow")
    victim = work.stop_engine()
    assert victim.server_pid is not None
    os.kill(victim.server_pid, signal.SIGKILL)

    done = next(point for point in work.whole() if point.id == victim.point)
    assert {sample.engine for sample in live.samples(done.id)} - {victim.id}, "the others took over"

    def back() -> bool:
        return any(engine.id == victim.id and engine.nonce != victim.nonce for engine in live.wait_engines())

    wait_for(back, "the engine to come back")
    assert not psutil.pid_exists(victim.server_pid)


def test_the_controller_killed_while_a_point_runs_ends_it_once_and_dispatch_answers_all_the_while(live: Live) -> None:
    live.wait_engines()
    live.client.put_run("meanwhile", RunSpec(root=str(live.root), suites=(SUITE,), max_in_flight=10_000))
    work = Work(live, "kill-controller", "slow")
    with _Dispatches(live.url) as answers:
        epoch = live.client.status().epoch
        controller, point = _stopped_while_running(work)
        controller.kill()
        wait_for(lambda: live.client.status().epoch > epoch, "another controller")
        done = next(done for done in work.whole() if done.id == point.id)
        wait_for(lambda: answers.count >= 10, "ten dispatches")
    assert answers.errors == []
    assert done.attempts == 2
    assert live.client.points(run="kill-controller").total == work.steps


def test_an_engines_whole_replica_killed_leaves_no_orphan_and_its_point_ends(live: Live) -> None:
    live.wait_engines()
    work = Work(live, "kill-replica", "slow")
    victim = work.stop_engine()
    assert victim.server_pid is not None
    assert victim.replica_pid is not None
    os.kill(victim.replica_pid, signal.SIGKILL)
    work.whole()
    work.let_go(victim)
    wait_for(lambda: not psutil.pid_exists(victim.server_pid or 0), "its server to be ended")

    def replaced() -> bool:
        return victim.id not in [engine.id for engine in live.wait_engines()]

    wait_for(replaced, "another replica to take its place")


class _Dispatches(threading.Thread):
    """Reserves without a pause, and keeps what went wrong; use it as a context."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.errors: list[str] = []
        self.count = 0
        self._url = url
        self._stop_asked = threading.Event()

    def run(self) -> None:
        with EvalClient(self._url) as client:
            while not self._stop_asked.wait(0.05):
                request = DispatchRequest(run="meanwhile", step=self.count, reservation=str(uuid.uuid4()))
                began = time.monotonic()
                try:
                    client.dispatch(request)
                except EvalfleetError as exc:
                    self.errors.append(f"after {time.monotonic() - began:.1f} s: {exc}")
                self.count += 1

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_asked.set()
        self.join()  # each of its calls has a deadline of its own
