"""Is an upstream alive? Asked over connections of its own, so that a full pool can't fail it.

Health is progress, not a 200: an upstream too busy to answer a probe in time is alive as long as it finishes requests,
and one that answers 5xx or refuses connections is not, whatever it did before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from router.exchange import Exchange, Request
from router.faults import Broken, FaultKind
from router.transport import Transport
from router.upstream import Upstream


@dataclass(frozen=True, slots=True)
class Health:
    """What a probe found; `detail` says how it is known."""

    alive: bool
    detail: str


class Prober:
    """Probes upstreams with GET `path`. `progress(id)` counts what an upstream has answered so far."""

    def __init__(
        self, *, timeout_s: float, path: str = "/health", progress: Callable[[str], int] = lambda _: 0
    ) -> None:
        self._timeout_s = timeout_s
        # A connection a probe: a kept one may be dead without anybody knowing.
        self._request = Request(b"GET", path.encode(), b"Connection: close\r\n", b"")
        self._progress = progress
        self._seen: dict[str, int] = {}
        self._transport: Transport | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections."""
        if self._transport is not None:
            await self._transport.close()

    async def probe(self, upstream: Upstream) -> Health:
        """Ask once, and look at the progress since the last probe; never raises for what the upstream does."""
        before = self._seen.get(upstream.id, self._progress(upstream.id))
        reply = await self._ask(upstream)
        if isinstance(reply, Broken):
            health = self._without_answer(upstream.id, reply, before)
        else:
            health = Health(reply < 500, f"answered {reply}")
        self._seen[upstream.id] = self._progress(upstream.id)
        return health

    def _without_answer(self, id_: str, why: Broken, before: int) -> Health:
        done = self._progress(id_) - before
        busy = why.kind is FaultKind.TIMEOUT and done > 0
        told = f"busy: {done} requests done since the last probe" if busy else f"{id_} {why.kind} ({why.detail})"
        return Health(busy, told)

    async def _ask(self, upstream: Upstream) -> int | Broken:
        if self._transport is None:
            self._transport = Transport(2 * self._timeout_s)  # never the first to give up
        exchange = Exchange(upstream.id, asyncio.get_running_loop().create_future())
        reply = await self._transport.send(upstream, self._request, exchange, timeout_s=self._timeout_s)
        return reply if isinstance(reply, Broken) else reply.status
