"""Checkpoint eval functions: points that need no engine of ours, one at a time for each function.

A function's process lives on from point to point, and is told to dispose when the controller stops acting. One that
crashed, hangs or was interrupted is ended with its children, and the next point has a new one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval_service.apart.process import Apart, Ended
from eval_service.contract.states import PinProof, PointState, Reason
from eval_service.controller.db import LedgerThread
from eval_service.controller.foreign import Keeper, Made, digest_now, metrics_of
from eval_service.controller.outcomes import LaneEnd, Overtaken
from eval_service.controller.recording import Weights
from eval_service.controller.scheduler import Claim
from eval_service.functions import SAMPLES
from eval_service.ledger.database import Fenced
from eval_service.ledger.moves import Moves, Runnable
from eval_service.objects.places import Places
from eval_service.scratch import Kind, scratch
from eval_service.suites.kinds import FunctionSuite
from eval_service.suites.suite import AnySuite

DISPOSE_S = 4.0  # less than the controller has for its own end
log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class FunctionLane:
    """One attempt at a point; a lane that leases nothing."""

    point: Runnable
    number: int
    suite: FunctionSuite
    functions: Functions
    engines: frozenset[str] = frozenset()
    open: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def claim(self) -> Claim:
        """It has use for no engine."""
        return Claim(self.point, 0)

    def look(self) -> None:
        """There is no engine to part with."""

    def join(self, engine_id: str) -> None:
        """Never: it wants none."""
        raise AssertionError(f"{self.suite.name} leases no engines")

    def cancel(self) -> None:
        """The point has ended otherwise, or the controller stops."""
        if self.task is not None:
            self.task.cancel()

    def start(self) -> asyncio.Task[None]:
        """Begin; the task raises nothing, it ends with its outcome in the ledger."""
        self.task = asyncio.get_running_loop().create_task(self._live())
        return self.task

    async def _live(self) -> None:
        moves, write, point = self.functions.moves, self.functions.ledger.patiently, self.point.id
        try:
            await self._attempt()
        except (Overtaken, Fenced, asyncio.CancelledError):
            await self.functions.drop(self.suite.name)
        except LaneEnd as exc:
            await write(moves.end, point, exc.state, exc.reason, exc.detail)
        except Exception as exc:
            log.exception("point %s: attempt %d", point, self.number)
            await self.functions.drop(self.suite.name)
            await write(moves.requeue, point, "internal", f"{type(exc).__name__}: {exc}")

    async def _attempt(self) -> None:
        functions = self.functions
        await self._advance(PointState.RUNNING)
        began = functions.clock()
        with scratch(Kind.ATTEMPT) as directory:
            asked = await digest_now(self.suite)
            await functions.renew(self.suite.name, asked)
            told = await self._told(directory)
            timings = {"pin_s": 0.0, "generate_s": functions.clock() - began}
            weights = Weights(told["weight_version"] or "", PinProof(told["pin_proof"]))
            await self._advance(PointState.SCORING)
            keeper = Keeper(self.point, self.number, self.suite, functions.moves, functions.ledger)
            await keeper.record(Made(metrics_of(told["metrics"]), directory / SAMPLES, weights, timings, asked))

    async def _told(self, directory: Path) -> dict[str, Any]:
        """What it reported.

        Raises:
            LaneEnd: it skipped, crashed, or took too long.
        """
        timeout_s = self.suite.config.timeout_s
        name = self.suite.name
        try:
            async with asyncio.timeout(timeout_s):
                told = await self._ask(directory)
        except TimeoutError as exc:
            await self.functions.drop(name)
            detail = f"the function did not end within {timeout_s:g} s"
            raise LaneEnd(PointState.FAILED, Reason.DEADLINE, detail) from exc
        except Ended as exc:
            await self.functions.drop(name)
            raise LaneEnd(PointState.FAILED, Reason.CRASHED, str(exc)) from exc
        if "skip" in told:
            raise LaneEnd(PointState.SKIPPED, Reason.EVAL_SKIP, told["skip"])
        if "crashed" in told:
            await self.functions.drop(name, dispose=True)
            raise LaneEnd(PointState.FAILED, Reason.CRASHED, told["crashed"])
        return told

    async def _ask(self, directory: Path) -> dict[str, Any]:
        config, point = self.suite.config, self.point
        manifest = await self.functions.ledger(self.functions.moves.manifest, point.snapshot_id)
        process = await self.functions.process(self.suite.name)
        async with self.functions.places.near(point.snapshot, manifest.digest) as place:
            await process.ask(
                do="evaluate",
                function=config.function,
                base=str(self.suite.base),
                options=config.options,
                snapshot=str(place),
                run=point.run,
                step=point.step,
                suite=point.suite,
                point=point.id,
                scratch=str(directory),
                canary=manifest.canary.model_dump(mode="json") if manifest.canary is not None else None,
            )
            return await process.answer()

    async def _advance(self, state: PointState) -> None:
        if not await self.functions.ledger.patiently(self.functions.moves.advance, self.point.id, state):
            raise Overtaken


@dataclass(slots=True, eq=False)
class Functions:
    """All functions of a controller, and their processes."""

    suites: Mapping[str, FunctionSuite]
    moves: Moves
    ledger: LedgerThread
    logs: Path
    clock: Callable[[], float]
    places: Places
    _processes: dict[str, Apart] = field(default_factory=dict)
    _asked: dict[str, str] = field(default_factory=dict)  # the digest that each was last evaluated under

    def next(self, queued: Sequence[Runnable], busy: frozenset[str]) -> list[Runnable]:
        """The first point of each function that is at none."""
        ordered = sorted(queued, key=lambda point: (-point.priority, not point.force, point.step, point.seq))
        first = {point.suite: point for point in reversed(ordered) if point.suite in self.suites}
        return [point for suite, point in first.items() if suite not in busy]

    def lane(self, point: Runnable, number: int) -> FunctionLane:
        """One attempt."""
        return FunctionLane(point, number, self.suites[point.suite], self)

    async def process(self, suite: str) -> Apart:
        """The function's, started if there is none; to have died while it did nothing is no point's crash."""
        if suite in self._processes and self._processes[suite].ended:
            await self.drop(suite)
        if suite not in self._processes:
            log_file = self.logs / f"function-{suite}.log"
            self._processes[suite] = await Apart.start("eval_service.apart.function_worker", log_file)
        return self._processes[suite]

    async def renew(self, suite: str, asked: str) -> None:
        """Have another process where the function's module or data has changed: what runs is what the digest tells."""
        if self._asked.get(suite, asked) != asked:
            await self.drop(suite, dispose=True)
        self._asked[suite] = asked

    async def drop(self, suite: str, *, dispose: bool = False) -> None:
        """End a function's process, and what it started."""
        process = self._processes.pop(suite, None)
        if process is not None:
            await (process.dispose(DISPOSE_S) if dispose else process.end())

    async def close(self) -> None:
        """Dispose of all of them."""
        names = list(self._processes)
        await asyncio.gather(*(self.drop(name, dispose=True) for name in names), return_exceptions=True)


def functions_among(
    suites: Mapping[str, AnySuite],
    moves: Moves,
    ledger: LedgerThread,
    logs: Path,
    clock: Callable[[], float],
    places: Places,
) -> Functions:
    """Of the service's suites, those that are functions."""
    found = {name: suite for name, suite in suites.items() if isinstance(suite, FunctionSuite)}
    return Functions(found, moves, ledger, logs, clock, places)
