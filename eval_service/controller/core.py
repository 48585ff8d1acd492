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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from eval_service.contract.errors import Unavailable
from eval_service.controller.acting import Acting, Parts
from eval_service.controller.db import LedgerThread
from eval_service.controller.sizing import Sizes
from eval_service.engine.protocol import Command, EngineReport
from eval_service.fleet_config import EVAL_GROUP
from eval_service.ledger.database import Fenced
from eval_service.ledger.moves import Moves
from eval_service.ledger.scaling import ScaleOrders
from eval_service.suites.scoring import ScorerPool
from router.limits import Limits
from router.proxy import Table, TableReport
from router.router import Router

TICK_S = 0.5  # whatever changes wakes it, but for a wake that was lost
IDLE_TICK_S = 2.0  # where no point is under way
HUNG_S = 15.0  # more than one call may wait for a ledger that others write
_SCORE_TIMEOUT_S = 30.0
log = logging.getLogger(__name__)


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
        self._acting: Acting | None = None
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
            await asyncio.to_thread(self._parts.lock.release)

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
        if not await self._taken():
            return
        ledger = LedgerThread()
        try:
            epoch = await ledger(self._parts.database.take_epoch)
            moves = Moves(self._parts.database, epoch, max_attempts=self._service.max_attempts)
            await ledger(moves.recover)
            await self._act(moves, ledger)
        finally:
            ledger.close()

    async def _taken(self) -> bool:
        """Whether the lock is held now; who is cancelled meanwhile still knows it before it is given up."""
        taking = asyncio.ensure_future(asyncio.to_thread(self._parts.lock.try_take))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            await asyncio.wait([taking])
            raise

    async def _still_held(self) -> None:
        if not self._parts.lock.held:
            raise Fenced("the lock was lost")

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
            self._acting = acting = Acting(self._parts, moves, ledger, scorers, router, sizes, self.wake, self._clock)
            woken = True
            try:
                while self._goes_on():
                    await self._tick(acting, woken=woken)
                    woken = await self._rest(IDLE_TICK_S if acting.idle else TICK_S)
            finally:
                self._acting = None
                await acting.close()
                await asyncio.to_thread(scorers.close)

    async def _tick(self, acting: Acting, *, woken: bool) -> None:
        everything = woken or bool(self.troubles)
        await self._tried("lock", self._still_held)
        await self._tried("changes", acting.look_for_changes)
        for name, step in acting.steps(everything=everything):
            if self._goes_on():
                await self._tried(name, step)
                self._beat = self._clock()

    def _goes_on(self) -> bool:
        return not self._stopping and not self.fenced

    async def _rest(self, tick_s: float = TICK_S) -> bool:
        """Wait for the next tick; whether somebody asked for it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(tick_s):
                await self._wake.wait()
        woken = self._wake.is_set()
        self._wake.clear()
        return woken
