"""The engines as their replicas report them, and the commands that go to them.

Everything here runs on the controller's loop. An engine is leased to one lane at most. A new boot nonce means that its
pin is gone; a pin that was under way then has failed. A command is handed out until a report says that it was taken, so
a lost answer loses nothing; while one is not finished its engine is not free, whoever still waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from urllib.parse import urlsplit

from eval_service.contract.wire import EngineState, FleetView
from eval_service.controller.engines import Engine, Good, Sent, first_of
from eval_service.controller.fleet_view import fleet_view
from eval_service.controller.sizing import Size
from eval_service.controller.throughput import Throughput
from eval_service.engine.addresses import is_loopback
from eval_service.engine.protocol import (
    IDLE_POLL_S,
    POLL_S,
    Command,
    CommandKind,
    CommandResult,
    EngineReport,
    PinError,
    PinOrder,
)
from eval_service.fleet_config import GroupConfig

FORGET_S = 60.0
QUARANTINE_S = 30.0  # then the engine is started anew; doubled each time that it fails again
MAX_QUARANTINE_S = 900.0
MAX_USELESS = 3  # answers that were no use, of one boot of an engine whose pins were proven
LEASED_KINDS = ("pinned", "attached")


class Fleet:
    """All engines.

    Args:
        groups: from fleet.toml.
        epoch: of the controller that acts; it goes into every command.
        lost_after_s: without a poll.
        node: the controller's; an engine of another one that names a loopback address is given no work. None: there
            is one node.
        on_change: called when an engine came, became free, was lost or started anew.
    """

    def __init__(
        self,
        groups: Mapping[str, GroupConfig],
        *,
        epoch: int,
        lost_after_s: float,
        node: str | None = None,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.groups = groups
        self._epoch = epoch
        self._lost_after_s = lost_after_s
        self._node = node
        self._on_change = on_change
        self._clock = clock
        self.throughput = Throughput(clock)
        self.engines: dict[str, Engine] = {}
        self.goods: tuple[Good, ...] = ()  # of any engine, the last one first
        self.proven: set[str] = set()  # digests of all snapshots that any engine was proven to hold

    # --- replicas

    async def poll(self, report: EngineReport) -> Command | None:
        """Take a report in; answer with a command, at once where there is one, else after a while."""
        engine = self._take(report)
        command = engine.next_command()
        if command is None:
            held_s = min(POLL_S if engine.point is not None else IDLE_POLL_S, self._lost_after_s / 2)
            if engine.report is report:
                engine.heard_at += held_s  # nothing can be heard of it before
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(held_s):
                        await engine.changed.wait()
            finally:
                if engine.report is report:  # no newer one is held
                    engine.heard_at = self._clock()
            command = engine.next_command()
        return command

    def _take(self, report: EngineReport) -> Engine:
        now, wall = self._clock(), time.time()
        engine = self.engines.get(report.engine)
        if engine is None:
            engine = self.engines[report.engine] = Engine(report, now, wall)
            self._on_change()
        before = (engine.ready, engine.free, engine.report.nonce, engine.report.state)
        engine.heard_at, engine.heard_wall, engine.lost = now, wall, False
        if report.number >= engine.report.number:
            if report.nonce != engine.report.nonce:
                self._forget_boot(engine, report.nonce)
            engine.report = report
            self._ask_what_it_recalls(engine)
            self._note_taken(engine, report)
            self._refuse_unreachable(engine)
        for result in report.results:
            self._note_result(engine, result)
        if before != (engine.ready, engine.free, report.nonce, report.state):
            engine.touch()
            self._on_change()
        return engine

    def _ask_what_it_recalls(self, engine: Engine) -> None:
        """Of a controller before this one, or of a time before it was lost to this one."""
        if engine.report.recalls and not engine.goods and not engine.asked:
            engine.asked = True
            self.send(engine.id, CommandKind.RECALL).add_done_callback(partial(self._recalled, engine))

    def _recalled(self, engine: Engine, recall: asyncio.Future[CommandResult]) -> None:
        if not recall.cancelled():
            told = [Good(order, None) for order in recall.result().recalled]
            engine.goods = first_of(*engine.goods, *told)
            self.goods = first_of(*self.goods, *told)
            self.proven.update(good.order.manifest.digest for good in told)

    def _refuse_unreachable(self, engine: Engine) -> None:
        """What answered at such an address here would be another engine than the one that told it."""
        report = engine.report
        if self._node is None or report.url is None or report.node == self._node or self._attached(report):
            return
        host = urlsplit(report.url).hostname or ""
        if is_loopback(host):
            engine.quarantined = f"{report.url} is reached on {report.node} alone; see service.engine_host"
            engine.retry_at = math.inf

    def _attached(self, report: EngineReport) -> bool:
        """Engines by URL are asked from the controller's own node; their `node` is the URL's."""
        return report.group in self.groups and self.groups[report.group].kind == "attached"

    def _note_taken(self, engine: Engine, report: EngineReport) -> None:
        for id_ in report.taken:
            if id_ in engine.sent:
                engine.sent[id_].taken = True

    def _note_result(self, engine: Engine, result: CommandResult) -> None:
        sent = engine.sent.pop(result.id, None)
        if sent is None:
            return
        if sent.command.kind is CommandKind.PIN:
            # Here and not where it is waited for: in between the engine may have been started anew.
            engine.pinned = sent.command.pin if result.ok else None
        if not sent.result.done():
            sent.result.set_result(result)
        engine.touch()  # who waits for it to have nothing to do may not be who waits for this result

    def _forget_boot(self, engine: Engine, nonce: str | None) -> None:
        """The server was started anew: its pin is gone, and pins under way have failed. A restart goes on."""
        engine.pinned = None
        engine.useless = 0
        if nonce is not None:
            engine.quarantined = None  # it is as good as new; what it is worth its next pin shows
        for id_, sent in list(engine.sent.items()):
            if sent.command.kind is CommandKind.PIN:
                self._note_result(engine, _died(id_, "the server ended"))

    # --- commands

    def send(self, engine_id: str, kind: CommandKind, pin: PinOrder | None = None) -> asyncio.Future[CommandResult]:
        """Send a command; the future is its result, `DIED` where the engine was lost on the way.

        One whose future is cancelled before any answer carried it is taken back.
        """
        engine = self.engines[engine_id]
        command = Command(f"{kind}-{uuid.uuid4().hex}", self._epoch, kind, pin)
        result: asyncio.Future[CommandResult] = asyncio.get_running_loop().create_future()
        engine.sent[command.id] = Sent(command, result)
        result.add_done_callback(lambda done: self._take_back(engine, command.id) if done.cancelled() else None)
        engine.touch()
        return result

    def _take_back(self, engine: Engine, command: str) -> None:
        if command in engine.sent and not engine.sent[command].handed:
            del engine.sent[command]
            engine.touch()
            self._on_change()

    async def wait_ready(self, engine_id: str, timeout_s: float) -> bool:
        """Wait until an engine serves (again) and has nothing to do; False where it does not in time, or is lost."""
        until = self._clock() + timeout_s
        while (engine := self.engines.get(engine_id)) is not None and engine.hopeful:
            if engine.ready and not engine.sent:
                return True
            left = until - self._clock()
            if left <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, POLL_S)):
                    await engine.changed.wait()
        return False

    # --- what becomes of engines

    def expire(self) -> list[Engine]:
        """Mark engines lost that have been silent for too long; returns those lost now.

        One that was let go left in good order, and is forgotten; so are those that were lost long ago.
        """
        now = self._clock()
        lost = []
        for engine in list(self.engines.values()):
            silent_s = now - engine.heard_at
            if not engine.lost and silent_s > self._lost_after_s:
                self._lose(engine)
                if engine.released and engine.point is None:
                    del self.engines[engine.id]
                else:
                    lost.append(engine)
            elif engine.lost and silent_s > FORGET_S and engine.point is None:
                del self.engines[engine.id]
        return lost

    def _lose(self, engine: Engine) -> None:
        engine.lost, engine.asked = True, False
        for id_ in list(engine.sent):
            self._note_result(engine, _died(id_, "the engine was lost"))
        engine.pinned = None
        engine.touch()
        self._on_change()

    def prove(self, engine_id: str, good: Good) -> None:
        """It holds this, proven."""
        engine = self.engines[engine_id]
        engine.goods = first_of(good, *engine.goods)
        self.goods = first_of(good, *self.goods)
        self.proven.add(good.order.manifest.digest)
        engine.strikes = 0

    def quarantine(self, engine_id: str, why: str) -> None:
        """Lease it to nobody until its server was started anew, which is asked for after a while."""
        engine = self.engines.get(engine_id)
        if engine is None or engine.quarantined is not None:
            return
        engine.quarantined = why
        engine.pinned = None
        engine.retry_at = self._clock() + min(MAX_QUARANTINE_S, QUARANTINE_S * 2**engine.strikes)
        engine.strikes += 1
        engine.touch()
        self._on_change()

    def useless(self, engine_id: str, why: str) -> None:
        """A proven engine gave an answer that can't be used: its pin counts no longer; after a few, nor does it."""
        engine = self.engines.get(engine_id)
        if engine is None:
            return
        engine.pinned = None
        engine.useless += 1
        if engine.useless >= MAX_USELESS:
            self.quarantine(engine_id, f"{engine.useless} times since its start its answers were no use: {why}")

    def heal(self) -> None:
        """Have engines whose quarantine is over started anew; ones that can't be get their chance as they are."""
        now = self._clock()
        for engine in self.engines.values():
            due = engine.quarantined is not None and now >= engine.retry_at and not engine.lost
            if due and not engine.sent:
                restart = self.send(engine.id, CommandKind.RESTART)
                restart.add_done_callback(partial(self._healed, engine))

    def _healed(self, engine: Engine, restart: asyncio.Future[CommandResult]) -> None:
        if restart.cancelled():
            return
        result = restart.result()
        if result.ok or result.error is PinError.REFUSED:
            engine.quarantined = None
            engine.touch()
            self._on_change()
        else:
            engine.retry_at = self._clock() + QUARANTINE_S

    def release(self) -> None:
        """Tell engines that are leaving, and have nothing of anybody's left, that they may go."""
        for engine in self.engines.values():
            leaving = engine.report.state is EngineState.LEAVING and not engine.lost
            if leaving and engine.point is None and not engine.sent and not engine.released:
                engine.released = True
                self.send(engine.id, CommandKind.LEAVE)

    # --- what is asked of it

    def leasable(self) -> list[Engine]:
        """Engines that are pinned for points, frozen groups' are not."""
        return [engine for engine in self.engines.values() if self._is_leasable(engine.report.group)]

    def free(self) -> list[Engine]:
        """Engines that may be leased now."""
        return [engine for engine in self.leasable() if engine.free]

    def loading(self) -> frozenset[str]:
        """Directories that engines were told to load and have not said that they are done with."""
        orders = (sent.command.pin for engine in self.engines.values() for sent in engine.sent.values())
        return frozenset(order.snapshot for order in orders if order is not None)

    def pinned(self) -> frozenset[str]:
        """Directories whose weights engines were proven to hold."""
        orders = (engine.pinned for engine in self.engines.values() if not engine.lost)
        return frozenset(order.snapshot for order in orders if order is not None)

    def _is_leasable(self, group: str) -> bool:
        return group in self.groups and self.groups[group].kind in LEASED_KINDS

    def view(self, in_flight: Callable[[str], int], sizes: Mapping[str, Size] | None = None) -> FleetView:
        """What `GET /fleet` shows; where no sizes were decided, those of the config."""
        return fleet_view(self.groups, self.engines.values(), self.throughput.per_s, in_flight, sizes)


def _died(command: str, detail: str) -> CommandResult:
    return CommandResult(command, ok=False, error=PinError.DIED, detail=detail)
