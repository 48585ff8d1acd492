"""A proxy in this process for tests, and a client of it that is nothing but a socket."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from router import Limits, Router, Upstream
from router.proxy import ProxyLimits, Server, Service, Table, Target, Targets
from tests.support.upstreams import PATIENCE_S

LIMITS = Limits(
    server_concurrency=8, connect_timeout_s=5, request_timeout_s=20, wait_timeout_s=20, same_again_after_s=0.05
)
GENERATE = "/lanes/lane/generate"


@dataclass
class Proxied:
    """A running proxy."""

    router: Router
    targets: Targets
    server: Server
    version: int = 0

    def tell(self, *upstreams: Upstream, name: str = "lane", **table: Any) -> None:
        """A table of one target."""
        self.version += 1
        vocab_size = table.pop("vocab_size", None)
        self.targets.replace(Table(self.version, {name: Target(upstreams, vocab_size)}, **table))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"


@asynccontextmanager
async def proxied(
    *upstreams: Upstream,
    limits: Limits = LIMITS,
    clients: ProxyLimits | None = None,
    api_key: str | None = None,
    vocab_size: int | None = None,
) -> AsyncIterator[Proxied]:
    """A proxy with one target, `lane`."""
    async with Router(limits) as router:
        targets = Targets(router)
        keys = () if api_key is None else (hashlib.sha256(api_key.encode()).digest(),)
        async with Server(Service(router, targets, clients, keys=keys)) as server:
            made = Proxied(router, targets, server)
            made.tell(*upstreams, vocab_size=vocab_size)
            yield made


@dataclass
class Got:
    """One answer as it came over the wire. `whole` is False if the connection ended before it did."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool = True
    chunks: list[bytes] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The envelope's."""
        assert set(self.json) == {"error"}
        assert set(self.json["error"]) <= {"code", "message", "hint"}
        return str(self.json["error"]["code"])


class Wire:
    """One connection to the proxy; every wait has a deadline."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def ask(
        self, path: str = "/lanes/lane/generate", body: bytes = b"{}", method: str = "POST", **headers: str
    ) -> None:
        """A request as a client makes it; `x_y` becomes the header X-Y."""
        self.send(request(path, body, method, **headers))

    async def head(self) -> Got:
        """An answer's head."""
        async with asyncio.timeout(PATIENCE_S):
            text = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        start, *lines = text.rstrip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return Got(int(start.split()[1]), headers, b"")

    async def chunk(self) -> bytes:
        """One chunk of a chunked body."""
        async with asyncio.timeout(PATIENCE_S):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            return (await self.reader.readexactly(size + 2))[:-2]

    async def answer(self, *, bodyless: bool = False) -> Got:
        """A whole answer, or as much of it as comes before the connection ends."""
        got = await self.head()
        try:
            if bodyless or got.status in (100, 204):
                return got
            if got.headers.get("transfer-encoding") == "chunked":
                while chunk := await self.chunk():
                    got.chunks.append(chunk)
                got.body = b"".join(got.chunks)
            else:
                async with asyncio.timeout(PATIENCE_S):
                    got.body = await self.reader.readexactly(int(got.headers["content-length"]))
        except (asyncio.IncompleteReadError, ConnectionError):
            got.whole = False
        return got

    async def closed(self) -> bytes:
        """What still comes until the proxy ends the connection."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


def request(path: str = GENERATE, body: bytes = b"{}", method: str = "POST", **headers: str) -> bytes:
    """A request's bytes."""
    lines = {"Host": "proxy", "Content-Length": str(len(body))} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


@asynccontextmanager
async def connected(proxy: Proxied) -> AsyncIterator[Wire]:
    """One connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.server.port)
    try:
        yield Wire(reader, writer)
    finally:
        await _close(writer)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def asked(proxy: Proxied, data: bytes | None = None, **request_: Any) -> Got:
    """One answer on a connection of its own."""
    async with connected(proxy) as wire:
        wire.send(request(**request_) if data is None else data)
        return await wire.answer()


Step = bytes | asyncio.Event | Callable[[], object]


@asynccontextmanager
async def scripted(
    *steps: bytes | asyncio.Event | Callable[[], object],
) -> AsyncIterator[tuple[Upstream, asyncio.Event]]:
    """An upstream that answers each request with these bytes, waiting for an event where one stands between them, and
    calling what can be called; the event that it yields is set once a client has left it."""
    left = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        watch = asyncio.ensure_future(reader.read(1))
        watch.add_done_callback(lambda done: None if done.cancelled() else left.set())
        try:
            for step in steps:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, bytes):
                    writer.write(step)
                else:
                    step()
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        except OSError:
            left.set()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await _close(writer)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(serve(reader, writer))
        tasks.add(task)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield Upstream("scripted", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {"X-Key": "s3cret"}), left
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """A request's body, by its length."""
    head = await reader.readuntil(b"\r\n\r\n")
    lengths: Sequence[bytes] = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return await reader.readexactly(int(lengths[0][15:])) if lengths else b""
