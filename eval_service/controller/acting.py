"""What only the lock's holder has, and what a look at it consists of; `core.py` says when there is one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from eval_service.contract.errors import Unavailable
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import PoolView
from eval_service.controller.admitting import Admissions
from eval_service.controller.board import Board
from eval_service.controller.costs import Costs
from eval_service.controller.db import LedgerThread
from eval_service.controller.fleet import Fleet
from eval_service.controller.functions import FunctionLane, functions_among
from eval_service.controller.housekeeping import Housekeeping
from eval_service.controller.lane import Lane, LaneParts
from eval_service.controller.outcomes import each_alone
from eval_service.controller.pin_orders import PinMaker
from eval_service.controller.proxied import ProxiedLane, ProxiedParts, proxied_parts
from eval_service.controller.scheduler import Claim, Lease, Shares, plan
from eval_service.controller.serving import ServedParts, Serving
from eval_service.controller.sizing import Sizes, worth
from eval_service.fleet_config import EVAL_GROUP, FleetConfig
from eval_service.ledger.bounds import Bounds
from eval_service.ledger.database import Database, Fenced
from eval_service.ledger.intents import Intents
from eval_service.ledger.lock import Lock
from eval_service.ledger.moves import Moves, Runnable
from eval_service.ledger.retention import Retention
from eval_service.ledger.scaling import ScaleOrders
from eval_service.ledger.servings import ServingMoves
from eval_service.objects.places import Places
from eval_service.suites.kinds import LmEvalSuite
from eval_service.suites.scoring import ScorerPool
from eval_service.suites.suite import AnySuite, functions_of
from router.router import Router

TIME_S = 2.0  # how late what only time changes (a deadline) may be seen
IDLE_TIME_S = 10.0  # where there is nothing that only time changes
LIFE_S = 1.0
IDLE_LIFE_S = 1.5  # of a fleet that does nothing: each tick, and well below what a controller is taken for dead after
_ALWAYS = ("engines", "housekeeping", "life")
_CLOSE_S = 5.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a controller is made of."""

    config: FleetConfig
    suites: Mapping[str, AnySuite]
    database: Database
    lock: Lock
    node: str | None = None  # where it runs, if engines may be on other nodes
    lane_key: str | None = field(default=None, repr=False)  # what lm-eval's processes bring to the proxy


class Acting:
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
        self._lanes: dict[str, Lane | FunctionLane] = {}
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
            node=parts.node,
            on_change=wake,
            clock=clock,
        )
        self._places = Places(parts.config.objects, self._service.state_dir)
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
            places=self._places,
            patience_s=self._service.point_timeout_s,
            handover_s=self._service.handover_s,
            on_change=wake,
            clock=clock,
        )
        now = parts.database.clock
        self._admissions = Admissions(self._service, moves, ledger, wake, self._places, now, settled=self._settled)
        logs = self._service.state_dir / "logs"
        self._functions = functions_among(parts.suites, moves, ledger, logs, clock, self._places)
        start_s = eval_group.start_timeout_s
        self._pins = PinMaker(self.fleet, self._service, start_s, on_trouble=wake, places=self._places, clock=clock)
        self.serving: Serving | None = None
        self._proxied: ProxiedParts | None = None
        if self._service.proxy_port is not None:
            self._serve_through(Board(moves.epoch, on_change=wake, clock=clock), wake)
        self._housekeeping = self._keep_house()

    def _keep_house(self) -> Housekeeping:
        """What goes on beside the points."""
        parts = self._parts
        bounds = Bounds.of(parts.config, parts.suites.keys(), functions_of(parts.suites))
        return Housekeeping(
            self._service,
            Intents(parts.database, bounds),
            Retention(parts.database, self._moves.epoch),
            self._ledger,
            loading=self.fleet.loading,
            pinned=self.fleet.pinned,
            changes=self._moves.changes,
            places=self._places,
        )

    def _serve_through(self, board: Board, wake: Callable[[], None]) -> None:
        """Lanes of the proxy: those that people ask for, and those of lm-eval's tasks."""
        slots, patience_s = self._parts.config.groups[EVAL_GROUP].server_concurrency, self._service.point_timeout_s / 2
        self._proxied = proxied_parts(self._parts.config, board, self._parts.lane_key)
        servings = ServingMoves(self._parts.database, self._moves.epoch)
        served = ServedParts(self.fleet, board, self._costs, slots, wake, self._clock)
        self.serving = Serving(served, servings, self._ledger, self._pins, patience_s=patience_s)

    async def look_for_changes(self) -> None:
        """Whether the ledger is as it was when all of it was last looked at."""
        number = await self._ledger(self._moves.changes)
        if number != self._number:
            self._number, self._look_at = number, float("-inf")

    @property
    def idle(self) -> bool:
        """Whether no engine works: for no point, and for nobody by way of the proxy."""
        return not self._lanes and not (self.serving is not None and self.serving.lanes)

    def steps(self, *, everything: bool) -> tuple[tuple[str, Callable[[], Awaitable[None]]], ...]:
        """What one look consists of, leases first: an idle engine waits for nobody; little where nothing changed."""
        little = not everything and self.idle and self._clock() < self._look_at
        if not little:
            self._look_at = self._clock() + TIME_S
        steps = (
            ("engines", self._look_at_engines),
            ("servings", self._serve),
            ("leases", self._lease),
            ("functions", self._begin_functions),
            ("sizes", self._decide_sizes),
            ("intents", self._take_intents),
            ("drains", self._tend_drains),
            ("overtaken", self._end_overtaken),
            ("overdue", self._end_overdue),
            ("admission", self._admissions.tick),
            ("time", self._look_at_time),
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
        await asyncio.gather(self._functions.close(), self._admissions.close(), self._housekeeping.close())
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
                self._settled()
            why = dict.fromkeys(self._lanes, "the controller evaluates it; its samples are kept with the point")
            self.serving.board.elsewhere(why)

    # --- points

    async def _take_intents(self) -> None:
        timeout_s = self._service.reservation_timeout_s
        if await self._ledger(self._moves.take_intents, reservation_timeout_s=timeout_s):
            self._settled()
            self._lane_parts.on_change()

    async def _tend_drains(self) -> None:
        if await self._ledger(self._moves.tend_drains):
            self._settled()

    async def _end_overtaken(self) -> None:
        """A point that somebody else ended lets its engines go at once; one whose lane is gone starts over."""
        lanes = list(self._lanes)
        for point in await self._ledger(self._moves.overtaken, lanes) if lanes else ():
            if point in self._lanes:
                self._lanes[point].cancel()
        strays = [point for point in await self._ledger(self._moves.strays, lanes) if point not in self._lanes]
        await each_alone(strays, self._requeue)

    async def _requeue(self, point: str) -> None:
        await self._ledger(self._moves.requeue, point, "internal", "its lane was gone")
        self._settled()  # it may have been the last attempt

    async def _end_overdue(self) -> None:
        await each_alone(await self._ledger(self._moves.overdue, self._service.point_timeout_s), self._end_late)

    async def _end_late(self, point: str) -> None:
        detail = f"not done within {self._service.point_timeout_s:.0f} s"
        if point in self._lanes:
            await self._ledger(self._moves.end, point, PointState.FAILED, Reason.DEADLINE, detail)
            self._lanes[point].cancel()
        else:
            await self._ledger(self._moves.end_unserved, point, detail)
            self._settled()

    async def _look_at_time(self) -> None:
        """The next look is late where it would find nothing; what is written by then comes to be known by itself."""
        if self.idle and not self._autoscaled and not await self._ledger(self._moves.time_matters):
            self._look_at = self._clock() + IDLE_TIME_S

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
            self._settled()

    async def _queued(self) -> dict[str, Runnable]:
        """Points whose lane is still to begin."""
        queued = [point for point in await self._ledger(self._moves.runnable) if point.id not in self._lanes]
        queued = [point for point in queued if point.suite not in self._functions.suites]
        return {point.id: point for point in queued if await self._has_suite(point)}

    async def _begin_functions(self) -> None:
        """Points that need no engine of ours."""
        if not self._functions.suites:
            return
        busy = frozenset(lane.point.suite for lane in self._lanes.values())
        for point in self._functions.next(await self._ledger(self._moves.runnable), busy):
            number = await self._ledger(self._moves.begin_attempt, point.id)
            if number is not None:
                self._start(self._functions.lane(point, number))

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
        if isinstance(lane, Lane) and lane.open and engine is not None and engine.free:
            self._served[lane.point.run] = max(self._served.values(), default=0) + 1
            lane.join(lease.engine)

    async def _has_suite(self, point: Runnable) -> bool:
        """A suite may be gone from the service's file since the point was asked for."""
        if point.suite in self._parts.suites:
            return True
        detail = f"the service has no suite {point.suite!r} any more"
        await self._ledger(self._moves.end, point.id, PointState.SKIPPED, Reason.UNHEALTHY, detail)
        self._settled()
        return False

    async def _begin(self, point: Runnable) -> Lane | None:
        """Start a lane; None where the point is no longer queued."""
        manifest = await self._ledger(self._moves.manifest, point.snapshot_id)
        number = await self._ledger(self._moves.begin_attempt, point.id)
        if number is None:
            return None
        pinner = self._pins.pinner(point, manifest, str(number))
        suite = self._parts.suites[point.suite]
        if isinstance(suite, LmEvalSuite) and self._proxied is not None:
            lane: Lane = ProxiedLane(point, number, suite, pinner, self._lane_parts, tasks=suite, proxied=self._proxied)
        else:
            lane = Lane(point, number, suite, pinner, self._lane_parts)
        self._start(lane)
        return lane

    def _start(self, lane: Lane | FunctionLane) -> None:
        self._lanes[lane.point.id] = lane
        lane.start().add_done_callback(lambda _: self._ended(lane.point.id))

    def _ended(self, point: str) -> None:
        self._lanes.pop(point, None)
        self._settled()
        self._lane_parts.on_change()

    def _settled(self) -> None:
        """A point may have ended, whatever ended it: what nobody needs any more goes now, not with the next scan."""
        self._housekeeping.something_settled()

    async def _show_life(self) -> None:
        now = self._clock()
        if now - self._shown_at < (IDLE_LIFE_S if self.idle else LIFE_S):
            return
        stats = self._router.stats()
        upstreams, gates = stats.upstreams, stats.targets.values()
        view = self.fleet.view(lambda id_: upstreams[id_].in_flight if id_ in upstreams else 0, self._sizes.now)
        pool = PoolView(
            capacity=sum(gate.capacity for gate in gates),
            in_flight=sum(gate.in_flight for gate in gates),
            waiting=sum(gate.waiting for gate in gates),
        )
        await self._ledger(self._moves.show_life, view.model_copy(update={"pool": pool}))
        self._shown_at = now
