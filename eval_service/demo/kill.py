"""Kills one engine in the middle of a point, once, and later shows that nothing was lost.

The engine's server process gets SIGKILL while the point that it is leased to is running and requests are in flight on
it; another engine is there to take them over.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eval_service.contract.states import PointState
from eval_service.contract.wire import EngineState, EngineView, PointView, SampleView

AFTER_DONE = 3  # points that must be done first: the kill falls in the middle of the run


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


@dataclass(slots=True)
class EngineKiller:
    """Looks for the moment; `owns` says whether a process is the demo's own, and no other is ever killed."""

    owns: Callable[[int], bool]
    clock: Callable[[], float]
    signal_process: Callable[[int, int], None] = os.kill
    kill: Kill | None = None

    def consider(
        self, points: Sequence[PointView], engines: Callable[[], list[EngineView]], state: Callable[[str], str]
    ) -> Kill | None:
        """Kill, if this is the moment, and say what was killed."""
        if self.kill is not None or sum(point.state is PointState.DONE for point in points) < AFTER_DONE:
            return None
        running = {point.id: point for point in points if point.state is PointState.RUNNING}
        victim = self._victim(running, engines()) if running else None
        if victim is None or victim.server_pid is None or victim.point is None:
            return None
        self.signal_process(victim.server_pid, signal.SIGKILL)
        self.kill = Kill(
            engine=victim.id,
            pid=victim.server_pid,
            nonce=victim.nonce,
            in_flight=victim.in_flight,
            point=victim.point,
            step=running[victim.point].step,
            at=self.clock(),
            point_state_after=state(victim.point),
        )
        return self.kill

    def _victim(self, running: dict[str, PointView], engines: list[EngineView]) -> EngineView | None:
        ready = [engine for engine in engines if engine.state is EngineState.READY]
        for engine in ready:
            busy = engine.point in running and engine.in_flight > 0
            if busy and len(ready) > 1 and engine.server_pid is not None and self.owns(engine.server_pid):
                return engine
        return None


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
