"""The controller: takes the lock, raises the epoch, and acts until it is stopped or fenced.

One event loop owns all of this. Every tick it carries out intents, notices what was lost, admits snapshots, leases
engines and shows its life in the ledger; what takes long (checks, lanes, scans, deletions) runs in tasks and threads.
It knows nothing of Ray: replicas reach it through `poll`, gateways through `wake`. A step of the tick that fails is
recorded and tried again with the next one; a mistake of ours that stays makes the controller unhealthy, a ledger that
is away does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from eval_service.contract.errors import Unavailable
from eval_service.contract.states import PointState, Reason
from eval_service.controller.admitting import Admissions
from eval_service.controller.board import Board
from eval_service.controller.costs import Costs
from eval_service.controller.db import LedgerThread
from eval_service.controller.fleet import Fleet
from eval_service.controller.housekeeping import Housekeeping
from eval_service.controller.lane import Lane, LaneParts
from eval_service.controller.outcomes import each_alone
from eval_service.controller.pin_orders import PinMaker
from eval_service.controller.scheduler import Claim, Lease, Shares, plan
from eval_service.controller.serving import ServedParts, Serving
from eval_service.controller.sizing import Sizes, worth
from eval_service.engine.protocol import Command, EngineReport
from eval_service.fleet_config import EVAL_GROUP, FleetConfig
from eval_service.ledger.bounds import Bounds
from eval_service.ledger.database import Database, Fenced
from eval_service.ledger.intents import Intents
from eval_service.ledger.lock import FileLock
from eval_service.ledger.moves import Moves, Runnable
from eval_service.ledger.retention import Retention
from eval_service.ledger.scaling import ScaleOrders
from eval_service.ledger.servings import ServingMoves
from eval_service.suites.scoring import ScorerPool
from eval_service.suites.suite import Suite
from router.limits import Limits
from router.proxy import Table, TableReport
from router.router import Router

TICK_S = 0.5  # whatever changes wakes it, but for a wake that was lost
TIME_S = 2.0  # how late what only time changes (a deadline) may be seen
LIFE_S = 1.0
_ALWAYS = ("engines", "housekeeping", "life")
HUNG_S = 15.0  # more than one call may wait for a ledger that others write
_SCORE_TIMEOUT_S = 30.0
_CLOSE_S = 5.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a controller is made of."""

    config: FleetConfig
    suites: Mapping[str, Suite]
    database: Database
    lock: FileLock


@dataclass(slots=True)
class Trouble:
    """A step of the tick that fails again and again."""

    since: float  # monotonic
    error: Exception

    @property
    def ours(self) -> bool:
        """Not just a ledger that is away for now."""
        return not isinstance(self.error, Unavailable)


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
        self.troubles: dict[str, Trouble] = {}
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

    async def poll_proxy(self, report: TableReport) -> Table:
        """The proxy's report, answered with the lanes that it drives.

        Raises:
            Unavailable: this controller does not act, or the service has no proxy.
        """
        serving = self._acting.serving if self._acting is not None else None
        if serving is None:
            raise Unavailable("this controller does not hold the lock, or has no proxy")
        return await serving.board.poll(report)

    def wake(self) -> None:
        """There is something to do."""
        self._wake.set()

    def healthy(self) -> bool:
        """Whether it makes progress and may go on."""
        now = self._clock()
        stuck = any(trouble.ours and now - trouble.since >= HUNG_S for trouble in self.troubles.values())
        return not self.fenced and not stuck and now - self._beat < HUNG_S

    # --- its life

    async def run(self) -> None:
        """Wait for the lock, act until stopped or fenced, and give the lock up."""
        try:
            while self._goes_on():
                await self._tried("begin", self._begin)
                self._beat = self._clock()
                await self._rest()
        finally:
            self._parts.lock.release()

    def stop(self) -> None:
        """End soon; points under way are left to the next controller."""
        self._stopping = True
        self._wake.set()

    async def _tried(self, name: str, step: Callable[[], Awaitable[None]]) -> None:
        """Run one step: a failure is recorded and hinders no other step."""
        try:
            await step()
        except Fenced as exc:
            log.warning("%s", exc)
            self.fenced = True
        except Exception as exc:
            known = self.troubles.get(name)
            if known is None:
                log.warning("%s: %s", name, exc, exc_info=not isinstance(exc, Unavailable))
            self.troubles[name] = Trouble(known.since if known else self._clock(), exc)
        else:
            self.troubles.pop(name, None)

    async def _begin(self) -> None:
        """Take the lock and the epoch, if they can be had now, and act."""
        if not self._parts.lock.try_take():
            return
        ledger = LedgerThread()
        try:
            epoch = await ledger(self._parts.database.take_epoch)
            moves = Moves(self._parts.database, epoch, max_attempts=self._service.max_attempts)
            await ledger(moves.recover)
            await self._act(moves, ledger)
        finally:
            ledger.close()

    async def _act(self, moves: Moves, ledger: LedgerThread) -> None:
        self.troubles.pop("begin", None)
        scorers = ScorerPool(self._service.scorer_processes, _SCORE_TIMEOUT_S)
        limits = Limits(
            server_concurrency=self._parts.config.groups[EVAL_GROUP].server_concurrency,
            request_timeout_s=self._service.sample_timeout_s,
            wait_timeout_s=self._service.point_timeout_s,
        )
        async with Router(limits) as router:
            groups = self._parts.config.groups
            before = await ledger(ScaleOrders(self._parts.database, groups).decided)
            sizes = Sizes(groups, before, self._clock)
            self._acting = acting = _Acting(self._parts, moves, ledger, scorers, router, sizes, self.wake, self._clock)
            woken = True
            try:
                while self._goes_on():
                    await self._tick(acting, woken=woken)
                    woken = await self._rest()
            finally:
                self._acting = None
                await acting.close()
                await asyncio.to_thread(scorers.close)

    async def _tick(self, acting: _Acting, *, woken: bool) -> None:
        everything = woken or bool(self.troubles)
        await self._tried("changes", acting.look_for_changes)
        for name, step in acting.steps(everything=everything):
            if self._goes_on():
                await self._tried(name, step)
                self._beat = self._clock()

    def _goes_on(self) -> bool:
        return not self._stopping and not self.fenced

    async def _rest(self) -> bool:
        """Wait for the next tick; whether somebody asked for it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), TICK_S)
        woken = self._wake.is_set()
        self._wake.clear()
        return woken


class _Acting:
    """What only the lock's holder has: the fleet, the lanes, the tasks."""

    def __init__(
        self,
        parts: Parts,
        moves: Moves,
        ledger: LedgerThread,
        scorers: ScorerPool,
        router: Router,
        sizes: Sizes,
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._parts = parts
        self._service = parts.config.service
        self._moves = moves
        self._ledger = ledger
        self._router = router
        self._clock = clock
        self._lanes: dict[str, Lane] = {}
        self._served: dict[str, int] = {}
        self._shown_at = float("-inf")
        self._number: int | None = None  # of the ledger's changes, when all of it was last looked at
        self._look_at = float("-inf")
        eval_group = parts.config.groups[EVAL_GROUP]
        self._costs = Costs(eval_group.server_concurrency)
        self.fleet = Fleet(
            parts.config.groups,
            epoch=moves.epoch,
            lost_after_s=self._service.engine_lost_s,
            on_change=wake,
            clock=clock,
        )
        self._scaling = ScaleOrders(parts.database, parts.config.groups)
        self._sizes = sizes
        self._autoscaled = any(group.autoscale for group in parts.config.groups.values())
        self._lane_parts = LaneParts(
            fleet=self.fleet,
            router=router,
            moves=moves,
            ledger=ledger,
            scorers=scorers,
            costs=self._costs,
            patience_s=self._service.point_timeout_s,
            handover_s=self._service.handover_s,
            on_change=wake,
            clock=clock,
        )
        self._admissions = Admissions(self._service, moves, ledger, wake, parts.database.clock)
        bounds = Bounds(self._service.roots, parts.suites.keys())
        retention = Retention(parts.database, moves.epoch)
        intents = Intents(parts.database, bounds)
        self._pins = PinMaker(self.fleet, self._service, eval_group.start_timeout_s, on_trouble=wake, clock=clock)
        self.serving = None
        if self._service.proxy_port is not None:
            board = Board(moves.epoch, on_change=wake, clock=clock)
            servings = ServingMoves(parts.database, moves.epoch)
            served = ServedParts(self.fleet, board, self._costs, eval_group.server_concurrency, wake, clock)
            self.serving = Serving(served, servings, ledger, self._pins, patience_s=self._service.point_timeout_s / 2)
        self._housekeeping = Housekeeping(
            self._service, intents, retention, ledger, loading=self.fleet.loading, pinned=self.fleet.pinned
        )

    async def look_for_changes(self) -> None:
        """Whether the ledger is as it was when all of it was last looked at."""
        number = await self._ledger(self._moves.changes)
        if number != self._number:
            self._number, self._look_at = number, float("-inf")

    def steps(self, *, everything: bool) -> tuple[tuple[str, Callable[[], Awaitable[None]]], ...]:
        """What one look consists of, leases first: an idle engine waits for nobody; little where nothing changed."""
        serving = self.serving is not None and bool(self.serving.lanes)
        little = not everything and not self._lanes and not serving and self._clock() < self._look_at
        if not little:
            self._look_at = self._clock() + TIME_S
        steps = (
            ("engines", self._look_at_engines),
            ("servings", self._serve),
            ("leases", self._lease),
            ("sizes", self._decide_sizes),
            ("intents", self._take_intents),
            ("drains", self._tend_drains),
            ("overtaken", self._end_overtaken),
            ("overdue", self._end_overdue),
            ("admission", self._admissions.tick),
            ("housekeeping", self._housekeeping.tick),
            ("life", self._show_life),
        )
        return tuple(step for step in steps if not little or step[0] in _ALWAYS)

    async def close(self) -> None:
        """Stop every task; nothing is written for what was under way."""
        if self.serving is not None:
            await self.serving.close()
        for lane in self._lanes.values():
            lane.cancel()
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=_CLOSE_S)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)
        await self._admissions.close()
        await self._housekeeping.close()
        await asyncio.to_thread(self._moves.close)

    # --- engines

    async def _look_at_engines(self) -> None:
        """Engines that are gone, or are not what they were, leave their lanes."""
        self.fleet.expire()
        self.fleet.heal()
        for lane in list(self._lanes.values()):
            lane.look()
        self.fleet.release()

    # --- what the proxy drives

    async def _serve(self) -> None:
        if self.serving is not None:
            if await self.serving.tick():
                self._housekeeping.something_settled()
            why = {id_: "the controller evaluates it; its samples are kept with the point" for id_ in self._lanes}
            self.serving.board.elsewhere(why)

    # --- points

    async def _take_intents(self) -> None:
        timeout_s = self._service.reservation_timeout_s
        if await self._ledger(self._moves.take_intents, reservation_timeout_s=timeout_s):
            self._housekeeping.something_settled()
            self._lane_parts.on_change()

    async def _tend_drains(self) -> None:
        await self._ledger(self._moves.tend_drains)

    async def _end_overtaken(self) -> None:
        """A point that somebody else ended lets its engines go at once; one whose lane is gone starts over."""
        lanes = list(self._lanes)
        for point in await self._ledger(self._moves.overtaken, lanes) if lanes else ():
            if point in self._lanes:
                self._lanes[point].cancel()
        strays = [point for point in await self._ledger(self._moves.strays, lanes) if point not in self._lanes]
        await each_alone(
            strays, lambda point: self._ledger(self._moves.requeue, point, "internal", "its lane was gone")
        )

    async def _end_overdue(self) -> None:
        await each_alone(await self._ledger(self._moves.overdue, self._service.point_timeout_s), self._end_late)

    async def _end_late(self, point: str) -> None:
        detail = f"not done within {self._service.point_timeout_s:.0f} s"
        if point in self._lanes:
            await self._ledger(self._moves.end, point, PointState.FAILED, Reason.DEADLINE, detail)
            self._lanes[point].cancel()
        else:
            await self._ledger(self._moves.end_unserved, point, detail)

    async def _lease(self) -> None:
        serving = self.serving
        if not self.fleet.free() and not (serving and serving.lanes):
            return
        by_id = await self._queued()
        claims = self._claims(by_id)
        free = sorted(engine.id for engine in self.fleet.free())
        held: dict[str, int] = {}
        for lane in (*self._lanes.values(), *(serving.lanes.values() if serving else ())):
            held[lane.point.run] = held.get(lane.point.run, 0) + len(lane.engines)
        if serving is not None:
            free = [id_ for id_ in free if not serving.board.holds(id_)]
            if not free:
                serving.give_way(claims, held)
            claims += serving.claims()
        for lease in plan(claims, free, Shares(held, self._served), patience_s=self._service.point_timeout_s / 2):
            await self._unless_bad(lease.point, self._give(lease, by_id))

    async def _unless_bad(self, point: str, step: Coroutine[Any, Any, None]) -> None:
        """What can't be begun for one point ends that point, and keeps no other from its engine."""
        try:
            await step
        except (Unavailable, Fenced):
            raise
        except Exception as exc:
            log.exception("point %s can't be begun", point)
            detail = f"it can't be begun: {type(exc).__name__}: {exc}"
            await self._ledger(self._moves.end, point, PointState.SKIPPED, Reason.SNAPSHOT_INVALID, detail)

    async def _queued(self) -> dict[str, Runnable]:
        """Points whose lane is still to begin."""
        queued = [point for point in await self._ledger(self._moves.runnable) if point.id not in self._lanes]
        return {point.id: point for point in queued if await self._has_suite(point)}

    def _claims(self, queued: Mapping[str, Runnable]) -> list[Claim]:
        claims = [lane.claim for lane in self._lanes.values()]
        return claims + [self._first_claim(point) for point in queued.values()]

    async def _decide_sizes(self) -> None:
        """How many engines there should be; Serve reads it off what is shown, so a change is shown at once."""
        work = worth(self._claims(await self._queued())) if self._autoscaled else 0
        if self._sizes.decide(await self._ledger(self._scaling.ordered), work):
            self._shown_at = float("-inf")

    def _first_claim(self, point: Runnable) -> Claim:
        """What a point has use for whose lane is still to begin."""
        size = self._parts.suites[point.suite].size
        waited_s = self._parts.database.clock() - point.queued_at
        return Claim(point, max(1, self._costs.engines_for(point.suite, size)), waited_s=waited_s)

    async def _give(self, lease: Lease, queued: Mapping[str, Runnable]) -> None:
        """Carry a lease out, if what it was planned for is still so: each ledger call lets time pass."""
        if self.serving is not None and self.serving.give(lease.point, lease.engine):
            return
        lane = self._lanes.get(lease.point)
        if lane is None and lease.point in queued:
            lane = await self._begin(queued[lease.point])
        engine = self.fleet.engines.get(lease.engine)
        if lane is not None and lane.open and engine is not None and engine.free:
            self._served[lane.point.run] = max(self._served.values(), default=0) + 1
            lane.join(lease.engine)

    async def _has_suite(self, point: Runnable) -> bool:
        """A suite may be gone from the service's file since the point was asked for."""
        if point.suite in self._parts.suites:
            return True
        detail = f"the service has no suite {point.suite!r} any more"
        await self._ledger(self._moves.end, point.id, PointState.SKIPPED, Reason.UNHEALTHY, detail)
        return False

    async def _begin(self, point: Runnable) -> Lane | None:
        """Start a lane; None where the point is no longer queued."""
        manifest = await self._ledger(self._moves.manifest, point.snapshot_id)
        number = await self._ledger(self._moves.begin_attempt, point.id)
        if number is None:
            return None
        pinner = self._pins.pinner(point, manifest, str(number))
        lane = Lane(point, number, self._parts.suites[point.suite], pinner, self._lane_parts)
        self._lanes[point.id] = lane
        lane.start().add_done_callback(lambda _: self._ended(point.id))
        return lane

    def _ended(self, point: str) -> None:
        self._lanes.pop(point, None)
        self._housekeeping.something_settled()
        self._lane_parts.on_change()

    async def _show_life(self) -> None:
        now = self._clock()
        if now - self._shown_at < LIFE_S:
            return
        upstreams = self._router.stats().upstreams
        view = self.fleet.view(lambda id_: upstreams[id_].in_flight if id_ in upstreams else 0, self._sizes.now)
        await self._ledger(self._moves.show_life, view)
        self._shown_at = now
