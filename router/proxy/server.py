"""The listening socket, all its clients, and the sweep that ends whoever is over time."""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType
from typing import Self

from router.exchange import Outlet
from router.proxy.client import ClientConnection
from router.proxy.messages import ClientRequest, Response
from router.proxy.service import Service

_BACKLOG = 2048
_SWEEP_S = 0.25
# A turn of uvloop's loop accepts one client a listener; when turns are long, many clients at once would wait for many.
_ACCEPTS = 16


class Server:
    """One proxy. Use it as an async context manager, or call `start` and `stop`; port 0 is any free one."""

    def __init__(self, service: Service, host: str = "127.0.0.1", port: int = 0) -> None:
        self.limits = service.limits
        self.draining = False
        self.buffered_bytes = 0
        self.connections: set[ClientConnection] = set()
        self._service = service
        self._address = (host, port)
        self._servers: list[asyncio.Server] = []
        self._sweep: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop(0.0)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._servers[0].sockets[0].getsockname()[1])

    async def answer(self, request: ClientRequest, outlet: Outlet) -> Response | None:
        """See `Service.answer`."""
        return await self._service.answer(request, outlet)

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address is taken, or is none of this machine's.
        """
        loop = asyncio.get_running_loop()
        with await _bound(*self._address) as bound:
            self._servers = [
                await loop.create_server(lambda: ClientConnection(self), sock=bound.dup(), backlog=_BACKLOG)
                for _ in range(_ACCEPTS)
            ]
        self._sweep = loop.call_later(_SWEEP_S, self._look)

    async def stop(self, grace_s: float) -> None:
        """Take no more clients, let what is at work finish for so long, then end it."""
        self.draining = True
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.drain()
        try:
            async with asyncio.timeout(grace_s):
                await self._emptied()
        except TimeoutError:
            for connection in list(self.connections):
                connection.abort()
            await self._emptied()
        if self._sweep is not None:
            self._sweep.cancel()

    async def _emptied(self) -> None:
        while self.connections:
            self._empty.clear()
            await self._empty.wait()

    def left(self) -> None:
        """A client's connection is gone."""
        if not self.connections:
            self._empty.set()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in [connection for connection in self.connections if connection.deadline < now]:
            connection.expire()
        self._sweep = loop.call_later(_SWEEP_S, self._look)


async def _bound(host: str, port: int) -> socket.socket:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setblocking(False)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
