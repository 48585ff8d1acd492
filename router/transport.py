"""The pool of connections to upstreams.

It never limits (the gate does, in front of it). A connection that has been idle for longer than any server waits is not
used again, so that a request never meets one that is being closed. When the caller's task is cancelled the connection
is closed, which is how an upstream learns that nobody waits any longer.
"""

from __future__ import annotations

import asyncio
import ssl
from functools import cached_property

from router.connection import Connection
from router.exchange import Exchange, Reply, Request
from router.faults import CONNECT_ERRORS, Broken, FaultKind
from router.upstream import Origin, Upstream

# Shorter than any server's (uvicorn: 5 s).
_KEEPALIVE_S = 2.0


class Transport:
    """The connections of one event loop. Closed once."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._loop = asyncio.get_running_loop()
        self._idle: dict[Origin, dict[Connection, None]] = {}  # the last used one last
        self._all: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def send(self, upstream: Upstream, request: Request, exchange: Exchange) -> Reply | Broken:
        """Send once; the answer, or why there is none. It ends when the exchange does, whoever ended that."""
        connection = self._take(upstream.origin)
        if connection is None:
            made = await self._connect(upstream.origin, exchange)
            if isinstance(made, Broken):
                return made
            connection = made
        connection.send(exchange, upstream, request)
        try:
            return await exchange.done
        finally:
            if connection.exchange is exchange:
                connection.abort()

    async def close(self) -> None:
        """Close every connection."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._all):
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # the transports' turn

    def _take(self, origin: Origin) -> Connection | None:
        idle = self._idle.get(origin)
        while idle:
            connection, _ = idle.popitem()
            if connection.usable and self._loop.time() - connection.idle_since < _KEEPALIVE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: Origin, exchange: Exchange) -> Connection | Broken:
        making = self._loop.create_task(self._open(origin))
        try:
            await asyncio.wait(
                (making, exchange.done), timeout=self._connect_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if making.done() and not exchange.done.done():
                return making.result()
        except CONNECT_ERRORS as exc:
            return Broken(FaultKind.CONNECT, f"{type(exc).__name__}: {exc}".rstrip(": "))
        except asyncio.CancelledError:
            _discard(making)
            raise
        _discard(making)
        if exchange.done.done() and isinstance(ended := exchange.done.result(), Broken):
            return ended
        return Broken(FaultKind.CONNECT, f"no connection within {self._connect_timeout_s:g} s")

    async def _open(self, origin: Origin) -> Connection:
        tls = self._tls if origin.tls else None
        _, connection = await self._loop.create_connection(
            lambda: Connection(lambda idle: self._keep(origin, idle), lambda gone: self._forget(origin, gone)),
            origin.host,
            origin.port,
            ssl=tls,
        )
        self._all.add(connection)
        return connection

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def _keep(self, origin: Origin, connection: Connection) -> None:
        if self._closed:
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        self._idle.setdefault(origin, {})[connection] = None
        if self._sweep is None:
            self._sweep = self._loop.call_later(_KEEPALIVE_S, self._drop_old)

    def _forget(self, origin: Origin, connection: Connection) -> None:
        self._all.discard(connection)
        if (idle := self._idle.get(origin)) is not None:
            idle.pop(connection, None)

    def _drop_old(self) -> None:
        self._sweep = None
        before = self._loop.time() - _KEEPALIVE_S
        for origin, idle in list(self._idle.items()):
            for connection in [connection for connection in idle if connection.idle_since <= before]:
                del idle[connection]
                connection.abort()
            if not idle:
                del self._idle[origin]
        if self._idle:
            self._sweep = self._loop.call_later(_KEEPALIVE_S, self._drop_old)


def _discard(making: asyncio.Task[Connection]) -> None:
    making.cancel()
    making.add_done_callback(_close_unclaimed)


def _close_unclaimed(made: asyncio.Task[Connection]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().abort()
