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

import aiohttp

from router.faults import TRANSPORT_ERRORS, Fault, FaultKind, fault_of
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
        self._path = path
        self._progress = progress
        self._seen: dict[str, int] = {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections."""
        if self._session is not None:
            await self._session.close()

    async def probe(self, upstream: Upstream) -> Health:
        """Ask once, and look at the progress since the last probe; never raises for what the upstream does."""
        before = self._seen.get(upstream.id, self._progress(upstream.id))
        try:
            status = await self._ask(upstream)
            health = Health(status < 500, f"answered {status}")
        except TRANSPORT_ERRORS as exc:
            health = self._without_answer(fault_of(upstream.id, exc), before)
        self._seen[upstream.id] = self._progress(upstream.id)
        return health

    def _without_answer(self, fault: Fault, before: int) -> Health:
        done = self._progress(fault.upstream) - before
        busy = fault.kind is FaultKind.TIMEOUT and done > 0
        return Health(busy, f"busy: {done} requests done since the last probe" if busy else str(fault))

    async def _ask(self, upstream: Upstream) -> int:
        if self._session is None:
            # A connection a probe: a kept one may be dead without anybody knowing.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        async with asyncio.timeout(self._timeout_s):
            async with self._session.get(upstream.url_of(self._path), headers=upstream.headers) as response:
                await response.read()
                return response.status
