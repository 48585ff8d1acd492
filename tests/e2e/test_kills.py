"""Kills on real parts: whatever dies, every point ends once, with its samples, and nothing is left over."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid

import psutil
import pytest

from eval_service.contract.client import EvalClient
from eval_service.contract.errors import EvalfleetError
from eval_service.contract.states import PointState
from eval_service.contract.wire import DispatchRequest, EngineView, PointView, RunSpec, Source
from tests.support.live import DONE, PROMPTS, SUITE, Live, wait_for

pytestmark = [pytest.mark.real, pytest.mark.destructive, pytest.mark.timeout(400)]


def _begin(live: Live, run: str, suite: str = "slow") -> PointView:
    """Dispatch the base model, and wait until its samples are under way."""
    live.client.put_run(run, RunSpec(root=str(live.root), suites=(suite,)))
    live.client.dispatch(
        DispatchRequest(run=run, step=0, source=Source.CALLER, snapshot=str(live.model), reservation=str(uuid.uuid4()))
    )

    def running() -> PointView | None:
        found = live.points(run)
        return found[0] if found and found[0].state is PointState.RUNNING else None

    return wait_for(running, f"{run} to run")


def _at_work(live: Live, point: PointView) -> EngineView:
    """An engine that has requests of the point in flight."""

    def busy() -> EngineView | None:
        found = [engine for engine in live.engines() if engine.point == point.id and engine.in_flight]
        return found[0] if found else None

    return wait_for(busy, "an engine at work", 30)


def _one_end(live: Live, run: str) -> PointView:
    [point] = live.ended(run, 1, timeout_s=180)
    assert point.state is DONE, point.detail
    samples = live.samples(point.id)
    assert sorted(sample.index for sample in samples) == list(range(PROMPTS))
    assert {sample.weight_version for sample in samples} == {point.weight_version}
    return point


def test_an_engine_killed_in_mid_point_costs_no_sample_and_comes_back_with_its_pin_gone(live: Live) -> None:
    live.wait_engines()
    point = _begin(live, "kill-engine")
    victim = _at_work(live, point)
    assert victim.server_pid is not None
    os.kill(victim.server_pid, signal.SIGKILL)
    done = _one_end(live, "kill-engine")
    assert {sample.engine for sample in live.samples(done.id)} - {victim.id}, "the others took over"

    def back() -> EngineView | None:
        return next((e for e in live.wait_engines() if e.id == victim.id and e.nonce != victim.nonce), None)

    assert wait_for(back, "the engine to come back").weight_version is None
    assert not psutil.pid_exists(victim.server_pid)


def test_the_controller_killed_while_a_point_runs_ends_it_once_and_dispatch_answers_all_the_while(live: Live) -> None:
    live.wait_engines()
    live.client.put_run("meanwhile", RunSpec(root=str(live.root), suites=(SUITE,), max_in_flight=10_000))
    _begin(live, "kill-controller")
    epoch = live.client.status().epoch
    answers = _Dispatches(live.url)
    answers.start()
    live.replica("controller").send_signal(signal.SIGKILL)
    wait_for(lambda: live.client.status().epoch > epoch, "another controller", 60)
    done = _one_end(live, "kill-controller")
    answers.finish()
    assert answers.errors == []
    assert answers.count >= 10
    assert done.attempts == 2
    assert len(live.client.points(run="kill-controller").points) == 1


def test_an_engines_whole_replica_killed_leaves_no_orphan_and_its_point_ends(live: Live) -> None:
    live.wait_engines()
    point = _begin(live, "kill-replica")
    victim = _at_work(live, point)
    assert victim.server_pid is not None
    assert victim.replica_pid is not None
    os.kill(victim.replica_pid, signal.SIGKILL)
    _one_end(live, "kill-replica")
    wait_for(lambda: not psutil.pid_exists(victim.server_pid or 0), "its server to be ended", 30)

    def replaced() -> bool:
        return victim.id not in [engine.id for engine in live.wait_engines()]

    wait_for(replaced, "another replica to take its place")


class _Dispatches(threading.Thread):
    """Reserves without a pause, and keeps what went wrong."""

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

    def finish(self) -> None:
        """End it."""
        self._stop_asked.set()
        self.join(30)
