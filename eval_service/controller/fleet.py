"""The engines as their replicas report them, and the commands that go to them.

Everything here runs on the controller's loop. An engine is leased to one lane at most. A new boot nonce means that its
pin is gone; a command that was under way then has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from eval_service.contract.wire import EngineState, EngineView, FleetView, GroupView
from eval_service.engine.protocol import (
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


@dataclass(slots=True, eq=False)
class Engine:
    """What is known of one engine."""

    report: EngineReport
    heard_at: float
    heard_wall: float
    point: str | None = None
    pinned: PinOrder | None = None
    last_good: PinOrder | None = None
    quarantined: str | None = None
    lost: bool = False
    outgoing: Command | None = None
    pending: dict[str, asyncio.Future[CommandResult]] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        """The replica's tag."""
        return self.report.engine

    @property
    def ready(self) -> bool:
        """It serves, and may be leased or pinned."""
        return not self.lost and self.quarantined is None and self.report.state is EngineState.READY

    @property
    def state(self) -> EngineState:
        """What it is doing, as shown."""
        if self.lost:
            return EngineState.LOST
        if self.quarantined is not None:
            return EngineState.QUARANTINED
        return EngineState.PINNING if self.pending else self.report.state

    def touch(self) -> None:
        """Something about it changed: wake who waits for that."""
        self.changed.set()
        self.changed = asyncio.Event()


class Fleet:
    """All engines.

    Args:
        groups: from fleet.toml.
        epoch: of the controller that acts; it goes into every command.
        lost_after_s: without a poll.
        on_change: called when an engine came, became ready, was lost or started anew.
    """

    def __init__(
        self,
        groups: Mapping[str, GroupConfig],
        *,
        epoch: int,
        lost_after_s: float,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.groups = groups
        self._epoch = epoch
        self._lost_after_s = lost_after_s
        self._on_change = on_change
        self._clock = clock
        self.engines: dict[str, Engine] = {}

    # --- replicas

    async def poll(self, report: EngineReport) -> Command | None:
        """Take a report in; answer with a command, at once where there is one, else after `POLL_S`."""
        engine = self._take(report)
        if engine.outgoing is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.changed.wait(), POLL_S)
            engine.heard_at = self._clock()
        command, engine.outgoing = engine.outgoing, None
        return command

    def _take(self, report: EngineReport) -> Engine:
        now, wall = self._clock(), time.time()
        engine = self.engines.get(report.engine)
        if engine is None:
            engine = self.engines[report.engine] = Engine(report, now, wall)
            self._on_change()
        before = (engine.ready, engine.report.nonce)
        if report.nonce != engine.report.nonce:
            self._forget_boot(engine)
        engine.report, engine.heard_at, engine.heard_wall, engine.lost = report, now, wall, False
        for result in report.results:
            future = engine.pending.pop(result.id, None)
            if future is not None and not future.done():
                future.set_result(result)
        if before != (engine.ready, report.nonce):
            engine.touch()
            self._on_change()
        return engine

    def _forget_boot(self, engine: Engine) -> None:
        """The server was started anew: its pin is gone, and pins under way have failed. A restart goes on."""
        engine.pinned = None
        for id_, future in list(engine.pending.items()):
            if not id_.startswith(CommandKind.RESTART) and not future.done():
                future.set_result(CommandResult(id_, ok=False, error=PinError.DIED, detail="the server ended"))
                engine.pending.pop(id_)

    # --- the controller

    def send(self, engine_id: str, kind: CommandKind, pin: PinOrder | None = None) -> asyncio.Future[CommandResult]:
        """Send a command; the future is its result, `DIED` where the engine was lost on the way."""
        engine = self.engines[engine_id]
        command = Command(f"{kind}-{uuid.uuid4().hex}", self._epoch, kind, pin)
        future: asyncio.Future[CommandResult] = asyncio.get_running_loop().create_future()
        engine.pending[command.id] = future
        engine.outgoing = command
        engine.touch()
        return future

    async def wait_ready(self, engine_id: str, timeout_s: float) -> bool:
        """Wait until an engine serves (again); False where it does not in time, or is lost."""
        until = self._clock() + timeout_s
        while (engine := self.engines.get(engine_id)) is not None and not engine.lost:
            if engine.ready and not engine.pending:
                return True
            left = until - self._clock()
            if left <= 0:
                return False
            try:
                await asyncio.wait_for(engine.changed.wait(), min(left, POLL_S))
            except TimeoutError:
                continue
        return False

    def expire(self) -> list[Engine]:
        """Mark engines lost that have been silent for too long; returns those lost now. Long lost ones are dropped."""
        now = self._clock()
        lost = []
        for engine in list(self.engines.values()):
            silent_s = now - engine.heard_at
            if not engine.lost and silent_s > self._lost_after_s:
                self._lose(engine)
                lost.append(engine)
            elif engine.lost and silent_s > FORGET_S and engine.point is None:
                del self.engines[engine.id]
        return lost

    def _lose(self, engine: Engine) -> None:
        engine.lost = True
        engine.pinned = None
        for id_, future in engine.pending.items():
            if not future.done():
                future.set_result(CommandResult(id_, ok=False, error=PinError.DIED, detail="the engine was lost"))
        engine.pending.clear()
        engine.touch()

    def quarantine(self, engine_id: str, why: str) -> None:
        """Lease it to nobody any more, until its server is started anew by its replica."""
        engine = self.engines.get(engine_id)
        if engine is not None:
            engine.quarantined = why
            engine.touch()

    def free(self, group: str) -> list[Engine]:
        """Engines of a group that may be leased."""
        return [
            engine
            for engine in self.engines.values()
            if engine.report.group == group and engine.ready and engine.point is None and not engine.pending
        ]

    def view(self, in_flight: Callable[[str], int]) -> FleetView:
        """What `GET /fleet` shows."""
        return FleetView(
            groups=tuple(self._group_view(name, group, in_flight) for name, group in self.groups.items()),
            seen_at=None,
        )

    def _group_view(self, name: str, group: GroupConfig, in_flight: Callable[[str], int]) -> GroupView:
        engines = tuple(
            _engine_view(engine, in_flight(engine.id))
            for engine in sorted(self.engines.values(), key=lambda engine: engine.id)
            if engine.report.group == name
        )
        return GroupView(
            name=name,
            kind=group.kind,
            grade=group.grade,
            desired=group.bounds[0],
            ready=sum(engine.state in (EngineState.READY, EngineState.PINNING) for engine in engines),
            engines=engines,
        )


def live(engines: Iterable[Engine]) -> list[Engine]:
    """Those that are not lost."""
    return [engine for engine in engines if not engine.lost]


def _engine_view(engine: Engine, in_flight: int) -> EngineView:
    report = engine.report
    return EngineView(
        id=engine.id,
        group=report.group,
        state=engine.state,
        detail=engine.quarantined or report.detail,
        url=report.url,
        node=report.node,
        nonce=report.nonce,
        server_pid=report.server_pid,
        supervisor_pid=report.supervisor_pid,
        replica_pid=report.replica_pid,
        snapshot=engine.pinned.manifest.digest if engine.pinned else None,
        weight_version=engine.pinned.weight_version if engine.pinned else None,
        point=engine.point,
        in_flight=in_flight,
        restarts=report.restarts,
        heard_at=engine.heard_wall,
    )
