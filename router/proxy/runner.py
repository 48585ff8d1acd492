"""A proxy that follows its owner's table: router, targets, follower and server, started and stopped together.

Whoever embeds it gives a source of tables, and asks `check` for its health. All of it lives on one event loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from router.limits import Limits
from router.proxy.limits import ProxyLimits
from router.proxy.server import Server
from router.proxy.service import Service
from router.proxy.table import Follower, Source, Targets
from router.router import Router

# For the process that a proxy has to itself: what a request leaves behind needs no collector, but what is in flight is
# looked through each time that it runs.
GC_THRESHOLDS = (50_000, 20, 20)


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """What one proxy is made of. Times are seconds."""

    host: str = "127.0.0.1"
    port: int = 0
    keys: tuple[bytes, ...] = field(
        default=(), repr=False
    )  # SHA-256 of those that clients may bring; none: anybody may ask
    lease_s: float = 5.0  # not told for so long, it serves nothing
    handover_s: float = 10.0  # for what is in flight on an upstream that leaves its target
    grace_s: float = 10.0  # for what is at work when it stops
    limits: Limits = field(default_factory=lambda: Limits(wait_timeout_s=60.0))
    clients: ProxyLimits = field(default_factory=ProxyLimits)


class ProxyRunner:
    """One proxy. `start`, `stop`, and in between `check`."""

    def __init__(self, settings: ProxySettings, source: Source) -> None:
        self._settings = settings
        self._router = Router(settings.limits)
        targets = Targets(self._router)
        self._server = Server(
            Service(self._router, targets, settings.clients, keys=settings.keys), settings.host, settings.port
        )
        self._follower = Follower(
            source, targets, self._router, lease_s=settings.lease_s, handover_s=settings.handover_s
        )
        self._following: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.port

    async def start(self) -> None:
        """Listen, and begin to ask for the table.

        Raises:
            OSError: the address is taken, or is none of this machine's.
        """
        await self._server.start()
        self._following = asyncio.get_running_loop().create_task(self._follower.run())

    def check(self) -> None:
        """Is it at work?

        Raises:
            RuntimeError: it has ended, and why.
        """
        if self._following is None or self._following.done():
            raise RuntimeError(f"the proxy follows no table: {self._following}")

    async def stop(self) -> None:
        """Take no more clients, let what is at work finish, give everything up."""
        if self._following is not None:
            self._following.cancel()
        await self._server.stop(self._settings.grace_s)
        await self._router.close()
