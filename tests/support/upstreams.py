"""Servers for the router's tests: real sockets on free ports, every knob an event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from router import Upstream

PATIENCE_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something holds; it fails at a deadline."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - counts of the router's have no event
            await asyncio.sleep(0.001)


@dataclass
class FakeUpstream:
    """Answers POST with its own id; holds every request while `open` is clear. `first`: statuses of its first answers,
    after which it is `status`.
    """

    id: str
    url: str = ""
    open: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = 200
    first: list[int] = field(default_factory=list)
    health: int | None = 200  # None: the probe hangs
    in_flight: int = 0
    peak: int = 0
    seen: int = 0
    left: int = 0
    headers: list[dict[str, str]] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)

    @property
    def upstream(self) -> Upstream:
        return Upstream(self.id, self.url, {"Authorization": f"Bearer {self.id}"})

    async def answer(self, request: web.Request) -> web.Response:
        await request.read()
        self.headers.append(dict(request.headers))
        self.queries.append(request.rel_url.raw_query_string)
        self.seen += 1
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.in_flight -= 1
        return web.json_response({"by": self.id}, status=self.first.pop(0) if self.first else self.status)

    async def tell_health(self, _: web.Request) -> web.Response:
        if self.health is None:
            await asyncio.Event().wait()
        return web.Response(status=self.health or 200)


@dataclass
class Running:
    """A started FakeUpstream and the way to end it as a kill would."""

    fake: FakeUpstream
    runner: web.AppRunner

    async def kill(self) -> None:
        """Every connection breaks, and the port is closed."""
        assert self.runner.server is not None
        for handler in list(self.runner.server.connections):
            if handler.transport is not None:
                handler.transport.abort()
        await self.runner.cleanup()


@asynccontextmanager
async def running(id_: str, *, held: bool = False) -> AsyncIterator[Running]:
    """Start one; it answers at once unless `held`."""
    fake = FakeUpstream(id_)
    if not held:
        fake.open.set()
    app = web.Application()
    app.router.add_post("/generate", fake.answer)
    app.router.add_get("/health", fake.tell_health)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield Running(fake, runner)
    finally:
        fake.open.set()
        await runner.cleanup()


@asynccontextmanager
async def raw_server(id_: str, reply: bytes) -> AsyncIterator[Upstream]:
    """A server that reads a request, writes these bytes, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        await reader.readexactly(length)
        writer.write(reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Upstream(id_, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    finally:
        server.close()
        await server.wait_closed()
