"""One client's connection: requests parsed, answered one at a time and in order, everything about it bounded.

Invariants: an answer is written whole, or its connection is cut so that it can't look whole; a client that leaves has
its task cancelled, and so its request upstream; answers go out in the order of the requests; nothing waits for a client
without a deadline, which the server's sweep looks after.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Protocol, cast

from router.errors import CutShort
from router.exchange import Exchange, Header, Outlet
from router.proxy.limits import ProxyLimits
from router.proxy.messages import (
    CONTINUE,
    LAST_CHUNK,
    ClientRequest,
    Refused,
    Response,
    chunk_of,
    overloaded,
    passed_head,
    passed_lines,
)
from router.proxy.reading import RequestReader

_log = logging.getLogger(__name__)
_NEVER = float("inf")
_MAX_PIPELINED = 8  # requests read ahead; more are left in the socket


class Hub(Protocol):
    """What the connections of one server share."""

    limits: ProxyLimits
    draining: bool
    buffered_bytes: int
    connections: set[ClientConnection]

    async def answer(self, request: ClientRequest, outlet: Outlet) -> Response | None:
        """See `Service.answer`."""

    def left(self) -> None:
        """A connection is gone from `connections`."""


class ClientConnection(asyncio.Protocol):
    """Made by the server for each client; it is also the outlet of the answer that is being passed on."""

    def __init__(self, hub: Hub) -> None:
        self.deadline = _NEVER
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        self._reader = RequestReader(hub, began=self._began, headed=self._headed, came=self._enqueue)
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._pending: deque[ClientRequest | Refused] = deque()
        self._working: ClientRequest | None = None
        self._task: asyncio.Task[None] | None = None
        self._exchange: Exchange | None = None
        self._begun = False
        self._chunked = False
        self._close_after = False
        self._stalled = False
        self._ending = False

    # --- for the server

    def expire(self) -> None:
        """The deadline has passed."""
        if self._ending or self._stalled or self._transport.is_closing():
            self._transport.abort()
        elif self._reader.midway:
            self._reader.refuse(Refused(408, "request_timeout", "the request took too long to come"))
        else:
            self._transport.close()

    def drain(self) -> None:
        """The server stops: end now if nothing is at work here, else after it."""
        if self._task is None and not self._ending:
            self._end()

    def abort(self) -> None:
        """End now, whatever is at work."""
        self._transport.abort()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        self._transport = cast(asyncio.Transport, transport)
        self._hub.connections.add(self)
        self._look_ahead()
        if len(self._hub.connections) > self._hub.limits.max_connections:
            self._reader.refuse(overloaded("too many clients are connected"))
        elif self._hub.draining:  # it came as the server stopped to listen
            self._end()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        self._reader.feed(data)

    def eof_received(self) -> None:
        """The client has left, or won't say more, which is taken for the same."""

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone: so is the wish for whatever it asked."""
        self._hub.connections.discard(self)
        self._hub.left()
        self._reader.stop()
        for item in self._pending:
            self._unbuffer(item)
        self._pending.clear()
        if self._task is not None:
            self._task.cancel()
            self._give_back()  # a task that had not begun never will

    def pause_writing(self) -> None:
        """The client takes less than comes: hold the upstream up."""
        self._stalled = True
        self.deadline = self._loop.time() + self._hub.limits.write_timeout_s
        if self._exchange is not None and self._exchange.wire is not None:
            self._exchange.wire.pause_reading()

    def resume_writing(self) -> None:
        """It has taken most of it."""
        self._stalled = False
        if self._exchange is not None and self._exchange.wire is not None:
            self._exchange.wire.resume_reading()
        if self._task is not None:
            self.deadline = _NEVER
        elif not self._ending:
            self._next()

    # --- told by the reader

    def _began(self) -> None:
        if self._task is None:
            self.deadline = self._loop.time() + self._hub.limits.head_timeout_s

    def _headed(self, expects: bool) -> None:
        if self._task is None:
            self.deadline = self._loop.time() + self._hub.limits.body_timeout_s
            if expects and not self._pending:
                self._transport.write(CONTINUE)

    # --- the outlet of what is passed on

    def holds(self, length: int | None) -> bool:
        """Short ones are held until they are whole, so that they can run again."""
        return length is not None and length <= self._hub.limits.hold_bytes

    def begin(self, exchange: Exchange, status: int, headers: list[Header], length: int | None) -> None:
        """From here on there is no way back."""
        self._exchange, self._begun, self._chunked = exchange, True, length is None
        if self._stalled and exchange.wire is not None:
            exchange.wire.pause_reading()
        lines = passed_lines(exchange.tail, headers)
        self._transport.write(passed_head(status, lines, length, close=self._closes()))

    def data(self, chunk: bytes) -> None:
        """At once, whatever its size."""
        self._transport.write(chunk_of(chunk) if self._chunked else chunk)

    def end(self) -> None:
        """It was whole."""
        self._exchange = None
        if self._chunked:
            self._transport.write(LAST_CHUNK)

    @property
    def slow(self) -> bool:
        """The client takes less than comes."""
        return self._stalled

    # --- one request after another

    def _enqueue(self, item: ClientRequest | Refused) -> None:
        self._pending.append(item)
        if self._task is None and not self._stalled:
            self._next()
        elif len(self._pending) == _MAX_PIPELINED and not self._transport.is_closing():
            self._transport.pause_reading()

    def _next(self) -> None:
        """Take up the next request, if there is one."""
        if not self._pending:
            self._look_ahead()
            return
        if len(self._pending) == _MAX_PIPELINED:
            self._transport.resume_reading()
        item = self._pending.popleft()
        if isinstance(item, Refused):
            self._close_after = True
            self._transport.write(item.response().rendered(close=True))
            self._end()
            return
        self.deadline = _NEVER
        self._close_after = not item.keep_alive
        self._working = item
        self._task = self._loop.create_task(self._serve(item))

    async def _serve(self, request: ClientRequest) -> None:
        try:
            response = await self._hub.answer(request, self)
        except CutShort:
            self._transport.abort()
            return
        except Exception:  # noqa: BLE001 - the task's edge: whatever it was, the client is told, or cut off
            _log.exception("a request failed inside the proxy")
            if self._begun:
                self._transport.abort()
                return
            response = Refused(500, "internal", "the proxy failed; its log says how").response()
        finally:
            self._give_back()
        if response is not None:
            close, head_only = self._closes(), request.method == b"HEAD"
            self._transport.write(response.rendered(close=close, head_only=head_only))
        self._finished()

    def _finished(self) -> None:
        self._task = self._exchange = None
        self._begun = False
        if self._closes():
            self._end()
        elif not self._stalled:
            self._next()

    def _closes(self) -> bool:
        return self._close_after or self._hub.draining

    def _look_ahead(self) -> None:
        """Nothing is at work: how long may the next request take to come?"""
        limits = self._hub.limits
        idle = not self._reader.midway
        self.deadline = self._loop.time() + (limits.idle_timeout_s if idle else limits.head_timeout_s)

    # --- endings

    def _end(self) -> None:
        """Let the client read what was written, but not for ever; closing at once might take it from it."""
        self._ending = True
        self._reader.stop()
        limits, unwritten = self._hub.limits, self._transport.get_write_buffer_size()
        self.deadline = self._loop.time() + (limits.write_timeout_s if unwritten else limits.linger_s)
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        else:
            self._transport.close()

    def _give_back(self) -> None:
        if self._working is not None:
            self._unbuffer(self._working)
            self._working = None

    def _unbuffer(self, item: ClientRequest | Refused) -> None:
        if isinstance(item, ClientRequest):
            self._hub.buffered_bytes -= len(item.body)
