"""A controller's end of the link, held by a test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from eval_service.contract.errors import Unavailable
from eval_service.contract.manifest import Manifest
from eval_service.engine.protocol import (
    Command,
    CommandKind,
    CommandResult,
    EngineReport,
    PinOrder,
)

_POLL_S = 0.2


class TestLink:
    """Keeps every report, hands out queued commands, and can be cut."""

    __test__ = False

    def __init__(self) -> None:
        self.reports: list[EngineReport] = []
        self.unheard: list[EngineReport] = []
        self.cut = False
        self.failure: Exception = Unavailable("no controller acts now")
        self.results: dict[str, CommandResult] = {}
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        self._news = asyncio.Event()
        self._next = 0

    async def poll(self, report: EngineReport) -> Command | None:
        """As the protocol says."""
        if self.cut:
            self.unheard.append(report)
            self._news.set()
            raise self.failure
        self.reports.append(report)
        self.results |= {result.id: result for result in report.results}
        self._news.set()
        try:
            async with asyncio.timeout(_POLL_S):
                return await self._commands.get()
        except TimeoutError:
            return None

    async def until(self, wanted: Callable[[EngineReport], bool], *, timeout_s: float = 90.0) -> EngineReport:
        """The first report, now or to come, that is wanted; the last one said so."""
        async with asyncio.timeout(timeout_s):
            while not (self.reports and wanted(self.reports[-1])):
                self._news.clear()
                await self._news.wait()
        return self.reports[-1]

    def give(self, kind: CommandKind, *, epoch: int = 1, pin: PinOrder | None = None, name: str | None = None) -> str:
        """Queue a command; its id."""
        self._next += 1
        name = name or f"command-{self._next}"
        self._commands.put_nowait(Command(name, epoch, kind, pin))
        return name

    async def done(self, name: str, *, timeout_s: float = 90.0) -> CommandResult:
        """The result of a command, once it was told."""
        await self.until(lambda _: name in self.results, timeout_s=timeout_s)
        return self.results[name]

    async def pin(
        self,
        path: Path,
        manifest: Manifest,
        label: str,
        *,
        epoch: int = 1,
        timeout_s: float = 60.0,
        visibility_timeout_s: float = 5.0,
    ) -> CommandResult:
        """Have a snapshot pinned."""
        order = PinOrder(str(path), manifest, label, timeout_s, visibility_timeout_s)
        return await self.done(self.give(CommandKind.PIN, epoch=epoch, pin=order))
