"""One client's connection: requests parsed, answered one at a time and in order, everything about it bounded.

Invariants: an answer is written whole, or its connection is cut so that it can't look whole; a client that leaves has
its task cancelled, and so its request upstream; answers go out in the order of the requests; nothing waits for a client
without a deadline, which the server's sweep looks after.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, Protocol, cast

import httptools

from router.connection import HOP_BY_HOP
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

_log = logging.getLogger(__name__)
_NEVER = float("inf")
_MAX_PIPELINED = 8  # requests read ahead; more are left in the socket
_MAX_HEADERS = 100
# Not for the upstream: what is between client and proxy alone, what is made anew, and the client's credentials.
_DROPPED = HOP_BY_HOP | frozenset(b"host content-length expect authorization x-api-key cookie".split())
_READ = frozenset(b"host content-length transfer-encoding expect authorization connection".split())
_KEEP = frozenset((b"close", b"keep-alive"))


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


class _Head:
    """What is known of a request that is being read."""

    __slots__ = ("body", "body_bytes", "bytes", "complete", "lines", "special", "url")

    def __init__(self) -> None:
        self.url = b""
        self.lines: list[tuple[bytes, bytes]] = []
        self.special: dict[bytes, list[bytes]] = {}
        self.bytes = 0
        self.complete = False
        self.body: list[bytes] = []
        self.body_bytes = 0


class ClientConnection(asyncio.Protocol):
    """Made by the server for each client; it is also the outlet of the answer that is being passed on."""

    def __init__(self, hub: Hub) -> None:
        self.deadline = _NEVER
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._head: _Head | None = None
        self._refusal: Refused | None = None
        self._deaf = False  # what comes from here on is not read
        self._fed = 0  # bytes of a head in the reads after its first
        self._pending: deque[ClientRequest | Refused] = deque()
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
        elif self._head is not None:
            self._refuse(Refused(408, "request_timeout", "the request took too long to come"))
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
            self._refuse(overloaded("too many clients are connected"))

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        if self._deaf:
            return
        self._fed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._deaf = True  # the request stands; the protocol stays as it is
        except httptools.HttpParserError as exc:
            self._refuse(self._refusal or Refused(400, "bad_request", f"this is no HTTP/1.1 request: {exc}"))
        else:
            head = self._head
            if head is not None and not head.complete and self._fed > self._hub.limits.max_head_bytes:
                self._refuse(self._head_too_big())

    def eof_received(self) -> None:
        """The client has left, or won't say more, which is taken for the same."""

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone: so is the wish for whatever it asked."""
        self._hub.connections.discard(self)
        self._hub.left()
        self._deaf = True
        for item in self._pending:
            self._unbuffer(item)
        self._pending.clear()
        self._drop_head()
        if self._task is not None:
            self._task.cancel()

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

    # --- httptools' callbacks; raising is the only way to stop the parser

    def on_message_begin(self) -> None:
        """A request begins."""
        self._head = _Head()
        self._fed = 0
        if self._task is None:
            self.deadline = self._loop.time() + self._hub.limits.head_timeout_s

    def on_url(self, url: bytes) -> None:
        """Its target, or a piece of it."""
        if (head := self._head) is not None:
            head.url += url
            head.bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line, or a trailer, which is dropped."""
        head = self._head
        if head is None or head.complete:
            return
        lower = name.lower()
        head.bytes += len(name) + len(value) + 4
        if lower in _READ:
            head.special.setdefault(lower, []).append(value)
        if lower not in _DROPPED:
            head.lines.append((lower, b"%b: %b\r\n" % (name, value)))

    def on_headers_complete(self) -> None:
        """The head is whole: refuse now what would be refused anyhow."""
        head = self._head
        assert head is not None
        head.complete = True
        self._refusal = self._fault_of(head)
        if self._refusal is not None:
            raise self._refusal
        if self._task is None:
            self.deadline = self._loop.time() + self._hub.limits.body_timeout_s
            if b"expect" in head.special and not self._pending:
                self._transport.write(CONTINUE)

    def on_body(self, chunk: bytes) -> None:
        """A piece of the body."""
        head = self._head
        assert head is not None
        head.body.append(chunk)
        head.body_bytes += len(chunk)
        self._hub.buffered_bytes += len(chunk)
        limits = self._hub.limits
        if head.body_bytes > limits.max_body_bytes:
            self._refusal = self._body_too_big()
        elif self._hub.buffered_bytes > limits.max_buffered_bytes:
            self._refusal = overloaded("too much is held for requests that are at work")
        if self._refusal is not None:
            raise self._refusal

    def on_message_complete(self) -> None:
        """The request is whole."""
        head, self._head = self._head, None
        assert head is not None
        keep_alive = self._parser.should_keep_alive() and not self._parser.should_upgrade()
        self._deaf = not keep_alive
        lines, nominated = head.lines, _nominated(head)
        if nominated:
            lines = [header for header in lines if header[0] not in nominated]
        authorization = head.special.get(b"authorization")
        self._enqueue(
            ClientRequest(
                method=self._parser.get_method(),
                url=head.url,
                headers=b"".join([line for _, line in lines]),
                body=head.body[0] if len(head.body) == 1 else b"".join(head.body),
                keep_alive=keep_alive,
                authorization=authorization[0] if authorization else None,
            )
        )

    # --- the outlet of what is passed on

    def holds(self, length: int | None) -> bool:
        """Short ones are held until they are whole, so that they can run again."""
        return length is not None and length <= self._hub.limits.hold_bytes

    def begin(self, exchange: Exchange, status: int, headers: list[Header], length: int | None) -> None:
        """From here on there is no way back."""
        self._exchange, self._begun, self._chunked = exchange, True, length is None
        if self._stalled and exchange.wire is not None:
            exchange.wire.pause_reading()
        lines = passed_lines(exchange.upstream, headers)
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
            self._unbuffer(request)
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
        idle = self._head is None
        self.deadline = self._loop.time() + (limits.idle_timeout_s if idle else limits.head_timeout_s)

    # --- endings

    def _refuse(self, refusal: Refused) -> None:
        """The answer to what is being read; nothing after it is read."""
        if self._deaf:
            return
        self._deaf = True
        self._drop_head()
        self._enqueue(refusal)

    def _end(self) -> None:
        """Let the client read what was written, but not for ever; closing at once might take it from it."""
        self._ending = self._deaf = True
        limits, unwritten = self._hub.limits, self._transport.get_write_buffer_size()
        self.deadline = self._loop.time() + (limits.write_timeout_s if unwritten else limits.linger_s)
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        else:
            self._transport.close()

    def _drop_head(self) -> None:
        if self._head is not None:
            self._hub.buffered_bytes -= self._head.body_bytes
            self._head = None

    def _unbuffer(self, item: ClientRequest | Refused) -> None:
        if isinstance(item, ClientRequest):
            self._hub.buffered_bytes -= len(item.body)

    # --- what is refused

    def _fault_of(self, head: _Head) -> Refused | None:
        limits, special = self._hub.limits, head.special
        if self._parser.get_http_version() != "1.1":
            return Refused(505, "http_version", "this proxy speaks HTTP/1.1")
        if head.bytes > limits.max_head_bytes or len(head.lines) > _MAX_HEADERS:
            return self._head_too_big()
        if len(special.get(b"host", ())) != 1:
            return Refused(400, "bad_request", "a request has one Host header")
        if any(value.strip().lower() != b"chunked" for value in special.get(b"transfer-encoding", ())):
            return Refused(501, "transfer_encoding", "this proxy takes chunked bodies and plain ones")
        if any(value.strip().lower() != b"100-continue" for value in special.get(b"expect", ())):
            return Refused(417, "expectation", "this proxy meets no expectation but 100-continue")
        if any(int(value) > limits.max_body_bytes for value in special.get(b"content-length", ())):
            return self._body_too_big()
        return None

    def _head_too_big(self) -> Refused:
        most = self._hub.limits.max_head_bytes
        return Refused(431, "head_too_big", f"a request's head has at most {most} bytes and {_MAX_HEADERS} headers")

    def _body_too_big(self) -> Refused:
        return Refused(413, "body_too_big", f"a request's body has at most {self._hub.limits.max_body_bytes} bytes")


def _nominated(head: _Head) -> set[bytes]:
    """Headers that the client meant for this connection alone."""
    values = head.special.get(b"connection")
    if not values:
        return set()
    return {token.strip() for value in values for token in value.lower().split(b",")} - _KEEP
