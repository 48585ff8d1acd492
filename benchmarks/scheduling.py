"""How busy the scheduler keeps engines: `python -m benchmarks.scheduling [--quick] [--json]`.

The controller is the real one; engines are fakes, each a process, whose answers take as long as they are told. An
engine counts as busy while it pins or has requests in flight, looked at every few milliseconds, over the time from the
first queued point to the last unsent sample.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, arguments, at_least, at_most, versions_of
from eval_service.contract.states import ENDS
from eval_service.engine.protocol import CommandKind
from eval_service.engine.runner import RunnerTimes
from tests.support.controller_stand import Stand

_LOOK_S = 0.005
_DEADLINE_S = 540.0
_SLOTS = 8
_LATENCY_S = 0.1


@dataclass(slots=True)
class Watch:
    """Engine-seconds spent at work, and those that there were, until the last sample was sent."""

    stand: Stand
    points: int
    busy_s: float = 0.0
    there_s: float = 0.0
    by_kind_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    begun: set[str] = field(default_factory=set)

    async def run(self) -> None:
        """Look until nothing is left to send."""
        before = time.monotonic()
        while self._unsent():
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            self._note(now - before)
            before = now

    def _unsent(self) -> bool:
        lanes = self.stand.acting._lanes
        self.begun |= lanes.keys()
        return len(self.begun) < self.points or any(lane._generation.unsent for lane in lanes.values())

    def _note(self, passed_s: float) -> None:
        upstreams = self.stand.acting._router.stats().upstreams
        for engine in self.stand.acting.fleet.engines.values():
            pinning = any(sent.command.kind is CommandKind.PIN for sent in engine.sent.values())
            generating = engine.id in upstreams and upstreams[engine.id].in_flight > 0
            kind = "pinning" if pinning else "generating" if generating else self._idle()
            self.by_kind_s[kind] += passed_s
            self.there_s += passed_s
            self.busy_s += passed_s if pinning or generating else 0.0

    def _idle(self) -> str:
        """While what: the checks of the first snapshots, points in the queue, or lanes that are not worth more pins."""
        if not self.begun:
            return "idle_at_first"
        return "idle_beside_queued" if len(self.begun) < self.points else "idle_at_last"


async def _ready(root: Path, engines: int, prompts: Mapping[str, int], latency_s: float) -> Stand:
    stand = Stand(
        root,
        prompts=prompts,
        processes=True,
        times=RunnerTimes(),
        server_concurrency=_SLOTS,
        knobs={"latency_s": latency_s},
        engine_lost_s=30,
    )
    stand.start_controller()
    for number in range(engines):
        stand.start_engine(f"e{number}")
    await stand.until_ready()
    return stand


async def _ended(stand: Stand, points: list[str]) -> None:
    await stand.until(lambda: all(stand.point(point).state in ENDS for point in points), timeout_s=_DEADLINE_S)


async def mix(root: Path, *, scale: int) -> tuple[Watch, dict[str, Any]]:
    """Three runs of different sizes, rhythms and priorities on eight engines."""
    stand = await _ready(root, 8, {"small": 40 * scale, "middle": 120 * scale, "large": 400 * scale}, _LATENCY_S)
    try:
        plan = [("often", "small", 12, 0), ("usual", "middle", 8, 0), ("rare", "large", 3, 1)]
        asked = [(run, suite, step) for run, suite, count, _ in plan for step in range(count)]
        for run, suite, _, priority in plan:
            stand.put_run(run, suites=(suite,), priority=priority)
        exports = {(run, step): stand.export(run, step) for run, _, step in asked}
        watch = Watch(stand, len(asked))
        points = [stand.dispatch(run, step, exports[run, step], suites=(suite,)) for run, suite, step in asked]
        began = time.monotonic()
        await watch.run()
        await _ended(stand, points)
        views = await stand.until_done(*points)
        counts = {"points": len(points), "samples": sum(len(stand.samples(view.id)) for view in views)}
        return watch, {**counts, "attempts": sum(view.attempts for view in views), "took_s": time.monotonic() - began}
    finally:
        await stand.close()


async def two_points(root: Path, engines: int, *, prompts: int) -> float:
    """Seconds from the dispatch of two points to the end of both."""
    stand = await _ready(root, engines, {"suite": prompts}, _LATENCY_S / 2)
    try:
        stand.put_run("r")
        exports = [stand.export("r", step) for step in (1, 2)]
        began = time.monotonic()
        points = [stand.dispatch("r", step, export) for step, export in zip((1, 2), exports, strict=True)]
        await _ended(stand, points)
        took_s = time.monotonic() - began
        await stand.until_done(*points)
        return took_s
    finally:
        await stand.close()


def measure(*, quick: bool) -> Report:
    """Everything that this benchmark tells."""
    report = Report("scheduling: how busy engines are kept", versions_of("evalfleet", "aiohttp", "sqlalchemy"))
    prompts = 400 if quick else 3000
    with tempfile.TemporaryDirectory(prefix="evalfleet-") as base:
        roots = [Path(base) / name for name in ("mix", "one", "two")]
        for root in roots:
            root.mkdir()
        watch, counts = asyncio.run(mix(roots[0], scale=1 if quick else 4))
        one_s, two_s = (asyncio.run(two_points(root, n, prompts=prompts)) for n, root in enumerate(roots[1:], start=1))
    report.counts |= {"engines": 8, "runs": 3, **counts, "two_points_samples": prompts}
    report.figures |= {f"{kind}_engine_s": round(seconds, 2) for kind, seconds in watch.by_kind_s.items()}
    report.figures |= {"two_points_one_engine_s": round(one_s, 2), "two_points_two_engines_s": round(two_s, 2)}
    report.targets["busy engine-seconds / engine-seconds"] = at_least(watch.busy_s / watch.there_s, 0.95)
    report.targets["two points: two engines / one engine"] = at_most(two_s / one_s, 0.55)
    return report


def main() -> int:
    """Measure and print; 1 where a target was missed."""
    given = arguments(__doc__ or "").parse_args()
    return measure(quick=given.quick).show(as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
