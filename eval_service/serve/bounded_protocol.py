"""uvicorn's HTTP/1.1 with the bounds that it lacks: of a head's size, of the time that it may take, and of connections.

Without them a client that sends half a head, or none at all, keeps its connection for ever, and one that never ends a
header fills the memory. Whatever is no request of HTTP gets the one envelope, too.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from eval_service.contract.errors import ErrorBody, ErrorEnvelope

HEAD_BYTES = 64 << 10
HEAD_S = 15.0
MOST_CONNECTIONS = 4096


class _HeadTooLarge(Exception):
    """Raised in the parser, which ends it."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    head_s = HEAD_S

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._heading = False  # a head has begun, and not ended
        self._head_bytes = 0
        self._fed_bytes = 0  # in the reads after the one that a head began in
        self._too_large = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        """Take it, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request."""
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._arm()
        self._fed_bytes += len(data)
        super().data_received(data)
        if self._heading and self._fed_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse_size()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._heading, self._head_bytes, self._fed_bytes = True, 0, 0

    def on_url(self, url: bytes) -> None:
        """Its target, or a piece of it."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of its lines; those after the body are nobody's."""
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._heading = False
        self._disarm()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Answered; where the next head has begun to come meanwhile, its time begins."""
        super().on_response_complete()
        if self._heading:
            self._arm()

    def send_400_response(self, msg: str) -> None:
        """Of whatever can't be parsed."""
        if self._too_large:
            self._refuse_size()
        else:
            self._refuse(400, "bad_request", "this is no HTTP/1.1 request")

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES:
            self._too_large = True
            raise _HeadTooLarge

    def _refuse_size(self) -> None:
        self._refuse(431, "head_too_large", f"a request's line and headers have at most {HEAD_BYTES} bytes")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer, unless an earlier request's answer is still to come or under way, and close."""
        self._disarm()
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not (cycle.response_started or self.pipeline):
            if cycle is not None and not cycle.response_complete:  # of the request that is broken: it answers no more
                cycle.disconnected = True
                cycle.message_event.set()
            body = (
                ErrorEnvelope(error=ErrorBody(code=code, message=message)).model_dump_json(exclude_none=True).encode()
            )
            lines = b"content-type: application/json\r\nx-content-type-options: nosniff\r\nconnection: close\r\n"
            self.transport.write(STATUS_LINE[status] + lines + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()

    def _arm(self) -> None:
        self._disarm()
        self._timer = self.loop.call_later(self.head_s, self._expire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self._heading:
            self._refuse(408, "too_slow", f"a request's head may take {self.head_s:g} s to come")
        elif not self.transport.is_closing():
            self.transport.close()


def bounded(head_s: float) -> type[BoundedProtocol]:
    """The protocol with another time for heads."""
    return type("BoundedProtocol", (BoundedProtocol,), {"head_s": head_s})
