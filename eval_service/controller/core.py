"""The controller: takes the lock, raises the epoch, and acts until it is stopped or fenced.

One event loop owns all of this. Every tick it carries out intents, notices what was lost, admits snapshots, leases
engines and shows its life in the ledger; what takes long (checks, lanes, scans, deletions) runs in tasks and threads.
It knows nothing of Ray: replicas reach it through `poll`, gateways through `wake`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from eval_service.contract.errors import Unavailable
from eval_service.contract.states import PointState, Reason
from eval_service.controller.admitting import Admissions
from eval_service.controller.db import LedgerThread
from eval_service.controller.fleet import Fleet
from eval_service.controller.housekeeping import Housekeeping
from eval_service.controller.lane import Lane, LaneParts
from eval_service.controller.pinning import Pinner
from eval_service.controller.scheduler import LaneLoad, plan
from eval_service.engine.protocol import Command, EngineReport, PinOrder
from eval_service.fleet_config import EVAL_GROUP, FleetConfig
from eval_service.ledger.database import Database, Fenced
from eval_service.ledger.intents import Bounds, Intents
from eval_service.ledger.lock import FileLock
from eval_service.ledger.moves import Moves, Runnable
from eval_service.ledger.retention import Retention
from eval_service.suites.scoring import ScorerPool
from eval_service.suites.suite import Suite
from router.limits import Limits
from router.router import Router

TICK_S = 0.25
LIFE_S = 1.0
HUNG_S = 10.0
_SCORE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What a controller is made of."""

    config: FleetConfig
    suites: Mapping[str, Suite]
    database: Database
    lock: FileLock


class Controller:
    """One of possibly several; only the lock's holder acts."""

    def __init__(self, parts: Parts, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._parts = parts
        self._clock = clock
        self._service = parts.config.service
        self._wake = asyncio.Event()
        self._stopping = False
        self._beat = clock()
        self._acting: _Acting | None = None
        self.fenced = False

    # --- what others call

    async def poll(self, report: EngineReport) -> Command | None:
        """A replica's report.

        Raises:
            Unavailable: this controller does not act.
        """
        if self._acting is None:
            raise Unavailable("this controller does not hold the lock")
        return await self._acting.fleet.poll(report)

    def wake(self) -> None:
        """There is something to do."""
        self._wake.set()

    def healthy(self) -> bool:
        """Whether it makes progress and may go on."""
        return not self.fenced and self._clock() - self._beat < HUNG_S

    # --- its life

    async def run(self) -> None:
        """Wait for the lock, act until stopped or fenced, and give the lock up."""
        while not self._stopping and not self._parts.lock.try_take():
            self._beat = self._clock()
            await self._rest()
        if self._stopping:
            return
        try:
            await self._act()
        except Fenced:
            self.fenced = True
        finally:
            self._parts.lock.release()

    def stop(self) -> None:
        """End soon; points under way are left to the next controller."""
        self._stopping = True
        self._wake.set()

    async def _act(self) -> None:
        ledger = LedgerThread()
        epoch = await ledger(self._parts.database.take_epoch)
        moves = Moves(self._parts.database, epoch, max_attempts=self._service.max_attempts)
        await ledger(moves.recover)
        scorers = ScorerPool(self._service.scorer_processes, _SCORE_TIMEOUT_S)
        concurrency = self._parts.config.groups[EVAL_GROUP].server_concurrency
        limits = Limits(server_concurrency=concurrency, request_timeout_s=self._service.sample_timeout_s)
        async with Router(limits) as router:
            acting = _Acting(self._parts, moves, ledger, scorers, router, self.wake)
            self._acting = acting
            try:
                while not self._stopping:
                    with contextlib.suppress(Unavailable):  # the ledger, for now: the next tick looks again
                        await acting.tick()
                    self._beat = self._clock()
                    await self._rest()
            finally:
                self._acting = None
                await acting.close()
                await asyncio.to_thread(scorers.close)
                ledger.close()

    async def _rest(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), TICK_S)
        self._wake.clear()


class _Acting:
    """What only the lock's holder has: the fleet, the lanes, the tasks."""

    def __init__(
        self,
        parts: Parts,
        moves: Moves,
        ledger: LedgerThread,
        scorers: ScorerPool,
        router: Router,
        wake: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._service = parts.config.service
        self._moves = moves
        self._ledger = ledger
        self._router = router
        self._lanes: dict[str, Lane] = {}
        self._shown_at = float("-inf")
        self.fleet = Fleet(
            parts.config.groups, epoch=moves.epoch, lost_after_s=self._service.engine_lost_s, on_change=wake
        )
        self._lane_parts = LaneParts(
            fleet=self.fleet,
            router=router,
            moves=moves,
            ledger=ledger,
            scorers=scorers,
            sample_timeout_s=self._service.sample_timeout_s,
            server_concurrency=parts.config.groups[EVAL_GROUP].server_concurrency,
            on_change=wake,
        )
        self._admissions = Admissions(self._service, moves, ledger, wake)
        bounds = Bounds(self._service.roots, parts.suites.keys())
        retention = Retention(parts.database, moves.epoch)
        self._housekeeping = Housekeeping(self._service, Intents(parts.database, bounds), retention, ledger)

    async def tick(self) -> None:
        """One look at everything."""
        call, moves = self._ledger, self._moves
        if await call(moves.take_intents, reservation_timeout_s=self._service.reservation_timeout_s):
            self._housekeeping.something_settled()
        self._notice_lost()
        await self._end_overdue()
        await call(moves.tend_drains)
        await self._cancel_overtaken()
        await self._admissions.tick()
        await self._lease()
        await self._housekeeping.tick()
        await self._show_life()

    async def close(self) -> None:
        """Stop every task; nothing is written for what was under way."""
        for lane in self._lanes.values():
            lane.cancel()
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._admissions.close()
        await self._housekeeping.close()

    # --- engines

    def _notice_lost(self) -> None:
        """Engines that are gone, or were started anew, leave their lanes."""
        self.fleet.expire()
        for lane in self._lanes.values():
            for engine_id in sorted(lane.engines):
                engine = self.fleet.engines.get(engine_id)
                gone = engine is None or engine.lost
                unpinned = engine_id in lane.proven and engine is not None and engine.pinned is not lane.pinner.order
                if gone or unpinned:
                    lane.drop(engine_id)
            lane.release_idle()

    # --- points

    async def _end_overdue(self) -> None:
        for point in await self._ledger(self._moves.overdue, self._service.point_timeout_s):
            detail = f"not done within {self._service.point_timeout_s:.0f} s"
            if point in self._lanes:
                await self._ledger(self._moves.end, point, PointState.FAILED, Reason.DEADLINE, detail)
                self._lanes[point].cancel()
            else:
                await self._ledger(self._moves.end_unserved, point, detail)

    async def _cancel_overtaken(self) -> None:
        """A point that was cancelled, superseded, aborted or deleted lets its engines go at once."""
        for point in await self._ledger(self._moves.overtaken, list(self._lanes)) if self._lanes else ():
            if point in self._lanes:
                self._lanes[point].cancel()

    async def _lease(self) -> None:
        queued = [point for point in await self._ledger(self._moves.runnable) if point.id not in self._lanes]
        loads = [LaneLoad(lane.point, len(lane.engines), lane.room) for lane in self._lanes.values()]
        by_id = {point.id: point for point in queued}
        free = sorted(engine.id for engine in self.fleet.free(EVAL_GROUP))
        leases = plan(queued, loads, free, self._workload(queued))
        for lease in leases:
            lane = self._lanes.get(lease.point) or await self._begin(by_id[lease.point])
            if lane is not None:
                lane.join(lease.engine)

    def _workload(self, queued: list[Runnable]) -> dict[str, int]:
        """How many engines a suite's samples fill."""
        concurrency = self._lane_parts.server_concurrency
        sizes = {suite: len(self._parts.suites[suite].prompts()) for suite in {point.suite for point in queued}}
        return {suite: -(-size // concurrency) for suite, size in sizes.items()}

    async def _begin(self, point: Runnable) -> Lane | None:
        """Start a lane; None where the point is no longer queued."""
        number = await self._ledger(self._moves.begin_attempt, point.id)
        if number is None:
            return None
        manifest = await self._ledger(self._moves.manifest, point.snapshot_id)
        order = PinOrder(
            snapshot=point.snapshot,
            manifest=manifest,
            weight_version=f"{point.digest[:8]}.{point.id}.{number}",
            timeout_s=self._service.pin_timeout_s,
            visibility_timeout_s=self._service.visibility_timeout_s,
        )
        restart_timeout_s = self._parts.config.groups[EVAL_GROUP].start_timeout_s
        pinner = Pinner(self.fleet, order, restart_timeout_s)
        lane = Lane(point, self._parts.suites[point.suite], pinner, self._lane_parts)
        self._lanes[point.id] = lane
        lane.start().add_done_callback(lambda _: self._ended(point.id))
        return lane

    def _ended(self, point: str) -> None:
        self._lanes.pop(point, None)
        self._housekeeping.something_settled()
        self._lane_parts.on_change()

    async def _show_life(self) -> None:
        now = time.monotonic()
        if now - self._shown_at < LIFE_S:
            return
        self._shown_at = now
        upstreams = self._router.stats().upstreams
        view = self.fleet.view(lambda id_: upstreams[id_].in_flight if id_ in upstreams else 0)
        await self._ledger(self._moves.show_life, view.model_dump_json())
