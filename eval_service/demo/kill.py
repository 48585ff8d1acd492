"""Kills one engine in the middle of a point, once, and later shows that nothing was lost.

The engine's server process gets SIGKILL while the point that it is leased to is running and requests are in flight on
it; another engine is there to take them over. A point may be over within half a second, and the fleet's view is a
second old: the process is stopped first, and killed once a later view shows its requests in flight.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from eval_service.contract.states import PointState
from eval_service.contract.wire import EngineState, FleetView, PointView, SampleView
from eval_service.demo.service import engines_of

AFTER_DONE = 3  # points that must be done first: the kill falls in the middle of the run
STOPPED_S = 4.0  # at most; the view is written once a second
VIEW_S = 0.25  # between what a view shows and its writing, at most


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
    """An engine that waits for the view that shows it busy."""

    engine: str
    pid: int
    point: PointView
    at: float


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
        """Stop an engine, kill the one that is stopped, or let it go on, as the moment is; say what was killed."""
        if self.kill is not None or sum(point.state is PointState.DONE for point in points) < AFTER_DONE:
            return None
        running = {point.id: point for point in points if point.state is PointState.RUNNING}
        view = fleet() if running or self.stopped else None
        if self.stopped is not None:
            return self._decide(self.stopped, running, view, state)
        if view is not None:
            self._stop(running, view)
        return None

    def let_go(self) -> None:
        """Whoever is stopped goes on."""
        if self.stopped is not None:
            with suppress(ProcessLookupError):
                self.signal_process(self.stopped.pid, signal.SIGCONT)
            self.stopped = None

    def _stop(self, running: dict[str, PointView], view: FleetView) -> None:
        ready = [engine for engine in engines_of(view) if engine.state is EngineState.READY]
        newest = max(running.values(), key=lambda point: point.started_at or 0.0)
        # The view may be from before the point: an engine that it shows on it comes first, then any.
        for engine in sorted(ready, key=lambda engine: engine.point not in running):
            pid = engine.server_pid
            if len(ready) > 1 and pid is not None and self.owns(pid):
                self.signal_process(pid, signal.SIGSTOP)
                self.stopped = Stopped(engine.id, pid, running.get(engine.point or "", newest), self.clock())
                return

    def _decide(
        self, stopped: Stopped, running: dict[str, PointView], view: FleetView | None, state: Callable[[str], str]
    ) -> Kill | None:
        point = stopped.point
        told = view is not None and (view.seen_at or 0.0) > stopped.at + VIEW_S
        if not told and point.id in running and self.clock() - stopped.at < STOPPED_S:
            return None
        engine = next((engine for engine in engines_of(view) if engine.id == stopped.engine), None)
        busy = engine is not None and engine.point == point.id and engine.in_flight > 0
        if engine is None or not (told and busy and point.id in running):
            self.let_go()
            return None
        self.signal_process(stopped.pid, signal.SIGKILL)
        self.stopped = None
        self.kill = Kill(
            engine=engine.id,
            pid=stopped.pid,
            nonce=engine.nonce,
            in_flight=engine.in_flight,
            point=point.id,
            step=point.step,
            at=self.clock(),
            point_state_after=state(point.id),
        )
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
