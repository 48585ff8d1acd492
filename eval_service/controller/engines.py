"""What the controller knows of one engine: what its replica reports, what it is leased to, and what it was told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from eval_service.contract.wire import EngineState
from eval_service.engine.protocol import Command, CommandResult, EngineReport, PinEvidence, PinOrder, remembered


@dataclass(frozen=True, slots=True)
class Good:
    """What an engine was seen to hold, proven; under a former controller where there is no evidence."""

    order: PinOrder
    evidence: PinEvidence | None


def first_of(*goods: Good) -> tuple[Good, ...]:
    """Those that are remembered."""
    return remembered(goods, lambda good: good.order)


@dataclass(slots=True, eq=False)
class Sent:
    """A command on its way or at work."""

    command: Command
    result: asyncio.Future[CommandResult]
    handed: bool = False  # a poll's answer carried it
    taken: bool = False  # the replica says that it has it


@dataclass(slots=True, eq=False)
class Engine:
    """What is known of one engine."""

    report: EngineReport
    heard_at: float
    heard_wall: float
    point: str | None = None
    pinned: PinOrder | None = None
    goods: tuple[Good, ...] = ()  # the last one first
    asked: bool = False  # what it recalls
    quarantined: str | None = None
    retry_at: float = 0.0
    strikes: int = 0  # quarantines since it was last proven
    useless: int = 0
    lost: bool = False
    released: bool = False
    sent: dict[str, Sent] = field(default_factory=dict)
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
    def hopeful(self) -> bool:
        """It is there, if not ready now."""
        return not self.lost and self.quarantined is None and self.report.state is not EngineState.LEAVING

    @property
    def free(self) -> bool:
        """It may be leased: it is ready, nobody's, and has nothing left to do."""
        return self.ready and self.point is None and not self.sent

    @property
    def state(self) -> EngineState:
        """What it is doing, as shown."""
        if self.lost:
            return EngineState.LOST
        if self.quarantined is not None:
            return EngineState.QUARANTINED
        return EngineState.PINNING if self.sent and self.ready else self.report.state

    def next_command(self) -> Command | None:
        """The first command that the replica does not have."""
        for sent in self.sent.values():
            if not sent.taken:
                sent.handed = True
                return sent.command
        return None

    def touch(self) -> None:
        """Something about it changed: wake who waits for that."""
        self.changed.set()
        self.changed = asyncio.Event()
