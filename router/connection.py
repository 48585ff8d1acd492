"""One HTTP/1.1 connection to an upstream. One request at a time; kept for the next one if nothing speaks against it.

Invariants: an exchange hears of its end exactly once; a connection goes back to its pool only after an answer that was
whole and said to keep it; a cut body is never taken for a whole one: llhttp counts, and an answer with neither a
length nor chunks is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import httptools

from router.exchange import Exchange, Header, Request
from router.faults import Broken, FaultKind, broken_of
from router.upstream import Upstream

MAX_HEAD_BYTES = 64 << 10
_BODYLESS = frozenset({204, 304})
# Meant for this connection alone, never for whoever is behind it.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)


class Connection(asyncio.Protocol):
    """Made by the pool, which hears when it can take a request, at first and again, and when it is gone."""

    def __init__(self, idle: Callable[[Connection], None], gone: Callable[[Connection], None]) -> None:
        self.exchange: Exchange | None = None
        self.idle_since = 0.0
        self._idle = idle
        self._gone = gone
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._headed = False  # the answer's head is whole
        self._head_bytes = 0
        self._chunked = False
        self._length: int | None = None
        self._headers: list[Header] = []
        self._nominated: set[bytes] = set()
        self._broken: Broken | None = None
        self._paused = False

    # --- for the pool

    @property
    def usable(self) -> bool:
        """Can it carry one more request?"""
        return not self._transport.is_closing()

    def send(self, exchange: Exchange, upstream: Upstream, request: Request) -> None:
        """Write a whole request; the exchange hears what comes of it."""
        self.exchange, exchange.wire = exchange, self
        body = request.body
        length = b"Content-Length: %d\r\n\r\n" % len(body) if body or request.method == b"POST" else b"\r\n"
        start = b"%b %b%b HTTP/1.1\r\n" % (request.method, upstream.base, request.path)
        self._transport.write(b"".join((start, upstream.head, request.headers, length, body)))

    def abort(self) -> None:
        """Close it at once, whatever is in flight."""
        self.exchange = None
        self._transport.abort()

    # --- for the exchange

    def pause_reading(self) -> None:
        """Read no more for now."""
        if self.usable and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if self.usable and self._paused:
            self._paused = False
            self._transport.resume_reading()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is up."""
        self._transport = cast(asyncio.Transport, transport)
        self._idle(self)

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer."""
        if self.exchange is None:
            self._transport.abort()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self._break(self._broken or broken_of(exc))
            return
        if not self._headed:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._break(Broken(FaultKind.PROTOCOL, f"a head of more than {MAX_HEAD_BYTES} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed, by whomever."""
        self._gone(self)
        if (exchange := self.exchange) is not None:
            self.exchange = None
            exchange.broke(broken_of(exc, in_body=self._headed))

    # --- httptools' callbacks

    def on_message_begin(self) -> None:
        """More than one answer to one request would be taken for the next one's."""
        if self.exchange is None:
            self._transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line, or a trailer, which is dropped."""
        if self._headed:
            return
        lower = name.lower()
        if lower == b"content-length":
            self._length = int(value)
        elif lower == b"transfer-encoding":
            self._chunked = value.lower().rstrip().endswith(b"chunked")
        elif lower == b"connection":
            self._nominated |= {token.strip() for token in value.lower().split(b",")}
        elif lower not in HOP_BY_HOP:
            self._headers.append((lower, b"%b: %b\r\n" % (name, value)))

    def on_headers_complete(self) -> None:
        """The head is whole; the body, if any, comes next."""
        status = self._parser.get_status_code()
        if status < 200:
            return
        if self._length is None and not self._chunked and status not in _BODYLESS:
            # Raising is the only way to stop the parser.
            self._broken = Broken(FaultKind.BODY, "an answer with neither Content-Length nor chunks may be cut short")
            raise ValueError(self._broken.detail)
        self._headed = True
        headers = self._headers
        if self._nominated - {b"close", b"keep-alive"}:
            headers = [header for header in headers if header[0] not in self._nominated]
        if (exchange := self.exchange) is not None:
            exchange.head(status, headers, 0 if status in _BODYLESS else None if self._chunked else self._length)

    def on_body(self, chunk: bytes) -> None:
        """A piece of the body."""
        if self.exchange is not None:
            self.exchange.data(chunk)

    def on_message_complete(self) -> None:
        """The answer is whole, or it was a 1xx and the answer is still to come."""
        headed = self._headed
        self._reset()
        if not headed or (exchange := self.exchange) is None:
            return
        self.exchange = None
        self.resume_reading()
        if self._parser.should_keep_alive() and self.usable:
            self._idle(self)
        else:
            self._transport.abort()
        exchange.end()

    def _reset(self) -> None:
        self._headed = False
        self._chunked = False
        self._length = None
        self._head_bytes = 0
        self._headers = []
        if self._nominated:
            self._nominated = set()

    def _break(self, why: Broken) -> None:
        exchange, self.exchange = self.exchange, None
        self._transport.abort()
        if exchange is not None:
            exchange.broke(why)
