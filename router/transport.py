"""The pool of connections to upstreams.

It never limits (the gate does, in front of it). A request that finds none idle has one made, and takes whichever is
free first, that one or another's. A connection that has been idle for longer than any server waits is not
used again, so that a request never meets one that is being closed. When the caller's task is cancelled the connection
is closed, which is how an upstream learns that nobody waits any longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property, partial

from router.connection import Connection
from router.deadlines import Deadlines
from router.exchange import Exchange, Reply, Request
from router.faults import CONNECT_ERRORS, Broken, FaultKind
from router.upstream import Origin, Upstream

# Shorter than any server's (uvicorn: 5 s).
_KEEPALIVE_S = 2.0


Obtained = Connection | Broken


@dataclass(slots=True, eq=False)
class _Pool:
    """The connections to one origin: all; those being made, by the requests that asked for them; the idle ones, the
    last used last; and the requests that are without one, never more than are being made.
    """

    live: set[Connection] = field(default_factory=set)
    making: set[asyncio.Future[Obtained]] = field(default_factory=set)
    idle: dict[Connection, None] = field(default_factory=dict)
    wanting: deque[asyncio.Future[Obtained]] = field(default_factory=deque)


class Transport:
    """The connections of one event loop. Closed once."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._loop = asyncio.get_running_loop()
        self._deadlines = Deadlines()
        self._pools: dict[Origin, _Pool] = {}
        self._making: set[asyncio.Task[None]] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False
        self._gone = asyncio.Event()

    async def send(
        self, upstream: Upstream, request: Request, exchange: Exchange, *, timeout_s: float
    ) -> Reply | Broken:
        """Send once; the answer, or why there is none. It ends when the exchange does, whoever ended that."""
        tick = self._deadlines.set(exchange, timeout_s)
        try:
            return await self._sent(upstream, request, exchange)
        finally:
            self._deadlines.clear(exchange, tick)

    async def _sent(self, upstream: Upstream, request: Request, exchange: Exchange) -> Reply | Broken:
        pool = self._pools.get(upstream.origin) or self._pools.setdefault(upstream.origin, _Pool())
        connection = self._take(pool)
        if connection is None:
            obtained = await self._wait(upstream.origin, pool, exchange)
            if isinstance(obtained, Broken):
                return obtained
            connection = obtained
            if not connection.usable:
                return Broken(FaultKind.DISCONNECTED, "it hung up at once")
        connection.send(exchange, upstream, request)
        try:
            return await exchange.done
        finally:
            if connection.exchange is exchange:
                connection.abort()

    async def close(self) -> None:
        """Close every connection."""
        self._closed = True
        self._deadlines.close()
        if self._sweep is not None:
            self._sweep.cancel()
        for task in self._making:
            task.cancel()
        if self._making:
            await asyncio.wait(self._making)
        for connection in self._live():
            connection.abort()
        while self._live():
            self._gone.clear()
            await self._gone.wait()

    def _live(self) -> list[Connection]:
        return [connection for pool in self._pools.values() for connection in pool.live]

    def _take(self, pool: _Pool) -> Connection | None:
        while pool.idle:
            connection, _ = pool.idle.popitem()
            if connection.usable and self._loop.time() - connection.idle_since < _KEEPALIVE_S:
                return connection
            connection.abort()
        return None

    async def _wait(self, origin: Origin, pool: _Pool, exchange: Exchange) -> Obtained:
        """The first connection that is free, unless the exchange ends before."""
        wanting: asyncio.Future[Obtained] = self._loop.create_future()
        pool.wanting.append(wanting)
        pool.making.add(wanting)
        making = self._loop.create_task(self._make(origin, pool, wanting))
        self._making.add(making)
        making.add_done_callback(partial(self._made, pool, wanting))
        exchange.done.add_done_callback(lambda done: _give_up(wanting, done))
        try:
            return await wanting
        except asyncio.CancelledError:
            if wanting.done() and not wanting.cancelled() and isinstance(had := wanting.result(), Connection):
                self._keep(pool, had)
            raise
        finally:
            with contextlib.suppress(ValueError):  # whoever got a connection is out already
                pool.wanting.remove(wanting)

    async def _make(self, origin: Origin, pool: _Pool, wanting: asyncio.Future[Obtained]) -> None:
        """One more connection, for whoever wants one once it is there. Its failure is for who asked for it; if that one
        has got another's meanwhile, for one whose own was taken so: where more wait than connections are being made.
        """
        failed = partial(self._fail, pool, wanting)
        making = asyncio.current_task()
        assert making is not None
        timer = self._loop.call_later(self._connect_timeout_s, making.cancel)
        try:
            await self._loop.create_connection(
                lambda: Connection(partial(self._idle, pool, wanting), partial(self._forget, pool)),
                origin.host,
                origin.port,
                ssl=self._tls if origin.tls else None,
            )
        except CONNECT_ERRORS as exc:
            failed(f"{type(exc).__name__}: {exc}".rstrip(": "))
        except asyncio.CancelledError:
            failed("the pool was closed" if self._closed else f"no connection within {self._connect_timeout_s:g} s")
            raise
        finally:
            timer.cancel()

    def _fail(self, pool: _Pool, wanting: asyncio.Future[Obtained], detail: str) -> None:
        if wanting not in pool.making:  # it came about after all
            return
        pool.making.discard(wanting)
        broken = Broken(FaultKind.CONNECT, detail)
        if _settle(wanting, broken):
            return
        waiting = [other for other in pool.wanting if not other.done()]
        if len(waiting) > len(pool.making):
            _settle(waiting[0], broken)

    def _made(self, pool: _Pool, wanting: asyncio.Future[Obtained], making: asyncio.Task[None]) -> None:
        self._making.discard(making)
        self._fail(pool, wanting, "none was made")

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def _idle(self, pool: _Pool, asked: asyncio.Future[Obtained], connection: Connection) -> None:
        """It can take a request, at first or again; `asked` had it made."""
        if not self._closed:
            pool.making.discard(asked)
        self._keep(pool, connection)

    def _keep(self, pool: _Pool, connection: Connection) -> None:
        if self._closed:
            connection.abort()
        if not connection.usable:
            return
        pool.live.add(connection)
        while pool.wanting:
            if _settle(pool.wanting.popleft(), connection):
                return
        connection.idle_since = self._loop.time()
        pool.idle[connection] = None
        if self._sweep is None:
            self._sweep = self._loop.call_later(_KEEPALIVE_S, self._drop_old)

    def _forget(self, pool: _Pool, connection: Connection) -> None:
        pool.live.discard(connection)
        self._gone.set()
        pool.idle.pop(connection, None)

    def _drop_old(self) -> None:
        self._sweep = None
        before = self._loop.time() - _KEEPALIVE_S
        for origin, pool in list(self._pools.items()):
            for connection in [connection for connection in pool.idle if connection.idle_since <= before]:
                del pool.idle[connection]
                connection.abort()
            if not pool.live and not pool.wanting and not pool.making:
                del self._pools[origin]
        if self._pools:
            self._sweep = self._loop.call_later(_KEEPALIVE_S, self._drop_old)


def _settle(wanting: asyncio.Future[Obtained], with_: Obtained) -> bool:
    if wanting.done():
        return False
    wanting.set_result(with_)
    return True


def _give_up(wanting: asyncio.Future[Obtained], done: asyncio.Future[Reply | Broken]) -> None:
    if not done.cancelled() and isinstance(ended := done.result(), Broken):
        _settle(wanting, ended)
