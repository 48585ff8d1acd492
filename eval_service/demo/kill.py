"""Kills one engine in the middle of a point, once, and later shows that nothing was lost.

The engine's server process gets SIGKILL while the point that it is leased to is running and requests are in flight on
it; another engine is there to take them over. A point may be over within half a second, and the fleet's view is a
second old: all engines are stopped first, so that the point stays as it is. The first later view may have been on its
way already, however late it was written; the second one is of after the stop. An engine that it shows with requests in
flight is killed, and the others go on.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from eval_service.contract.states import PointState
from eval_service.contract.wire import EngineState, FleetView, PointView, SampleView
from eval_service.demo.service import engines_of

AFTER_DONE = 3  # points that must be done first: the kill falls in the middle of the run
STOPPED_S = 8.0  # at most; the view is written once a second


@dataclass(frozen=True, slots=True)
class Kill:
    """What was killed, and where."""

    engine: str
    pid: int
    nonce: str | None
    in_flight: int
    point: str
    step: int
    at: float
    point_state_after: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """Engines, with their processes, that wait for the view that shows one busy. `view_at`: of the first later view."""

    pids: Mapping[str, int]
    at: float
    view_at: float | None = None


@dataclass(slots=True)
class EngineKiller:
    """Looks for the moment; `owns` says whether a process is the demo's own, and no other gets a signal.

    Args:
        clock: as `time.time`, which is also what the fleet's view carries.
    """

    owns: Callable[[int], bool]
    clock: Callable[[], float]
    signal_process: Callable[[int, int], None] = os.kill
    kill: Kill | None = None
    stopped: Stopped | None = None

    def consider(
        self, points: Sequence[PointView], fleet: Callable[[], FleetView | None], state: Callable[[str], str]
    ) -> Kill | None:
        """Stop the engines, kill one that is stopped, or let them go on, as the moment is; say what was killed."""
        if self.kill is not None or sum(point.state is PointState.DONE for point in points) < AFTER_DONE:
            return None
        running = {point.id: point for point in points if point.state is PointState.RUNNING}
        view = fleet() if running or self.stopped else None
        if self.stopped is not None:
            return self._decide(self.stopped, running, view, state)
        if view is not None:
            self._stop(view)
        return None

    def let_go(self) -> None:
        """Whoever is stopped goes on."""
        if self.stopped is not None:
            for pid in self.stopped.pids.values():
                with suppress(ProcessLookupError):
                    self.signal_process(pid, signal.SIGCONT)
            self.stopped = None

    def _stop(self, view: FleetView) -> None:
        ready = [engine for engine in engines_of(view) if engine.state is EngineState.READY]
        pids = {engine.id: engine.server_pid for engine in ready if engine.server_pid and self.owns(engine.server_pid)}
        if len(ready) < 2:
            return
        self.stopped = Stopped(pids, self.clock())
        for pid in pids.values():
            with suppress(ProcessLookupError):
                self.signal_process(pid, signal.SIGSTOP)

    def _decide(
        self, stopped: Stopped, running: dict[str, PointView], view: FleetView | None, state: Callable[[str], str]
    ) -> Kill | None:
        seen_at = (view.seen_at if view is not None else None) or 0.0
        told = stopped.view_at is not None and seen_at > stopped.view_at
        if not told and running and self.clock() - stopped.at < STOPPED_S:
            if stopped.view_at is None and seen_at > stopped.at:
                self.stopped = replace(stopped, view_at=seen_at)
            return None
        found = [engine for engine in engines_of(view) if engine.id in stopped.pids] if told else []
        busy = [engine for engine in found if engine.point in running and engine.in_flight]
        if not busy:
            self.let_go()
            return None
        engine = max(busy, key=lambda engine: engine.in_flight)
        pid, point = stopped.pids[engine.id], running[str(engine.point)]
        self.signal_process(pid, signal.SIGKILL)
        self.kill = Kill(
            engine=engine.id,
            pid=pid,
            nonce=engine.nonce,
            in_flight=engine.in_flight,
            point=point.id,
            step=point.step,
            at=self.clock(),
            point_state_after=state(point.id),  # before anybody takes its requests over
        )
        self.let_go()
        return self.kill


def proof(kill: Kill, point: PointView, samples: Sequence[SampleView], expected: int) -> dict[str, Any]:
    """What became of the point whose engine was killed."""
    by_engine = Counter(sample.engine for sample in samples)
    return {
        **asdict(kill),
        "point_state": point.state.value,
        "attempts": point.attempts,
        "samples": len(samples),
        "samples_expected": expected,
        "samples_with_error": sum(sample.error is not None for sample in samples),
        "samples_by_engine": dict(by_engine),
        "samples_from_others": sum(count for engine, count in by_engine.items() if engine != kill.engine),
        "weight_versions": sorted({sample.weight_version for sample in samples}),
        "weight_version_pinned": point.weight_version,
    }
