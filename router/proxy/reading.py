"""Requests out of a client's bytes: parsed by llhttp, bounded, and stripped of what is not for an upstream.

Invariants: nothing is read after a request that is refused, or that ends its connection; what is given on is whole;
`hub.buffered_bytes` counts each body from its first byte until whoever got the request gives it back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import httptools

from router.connection import HOP_BY_HOP
from router.proxy.limits import ProxyLimits
from router.proxy.messages import ClientRequest, Refused, overloaded

_MAX_HEADERS = 100
# Not for the upstream: what is between client and proxy alone, what is made anew, and the client's credentials.
_DROPPED = HOP_BY_HOP | frozenset(b"host content-length expect authorization x-api-key cookie".split())
_READ = frozenset(b"host content-length transfer-encoding expect authorization connection".split())
_KEEP = frozenset((b"close", b"keep-alive"))


class Buffer(Protocol):
    """What all clients of a server share."""

    limits: ProxyLimits
    buffered_bytes: int


class _Partial:
    """What is known of a request that is being read."""

    __slots__ = ("body", "body_bytes", "complete", "head_bytes", "lines", "special", "url")

    def __init__(self) -> None:
        self.url = b""
        self.lines: list[tuple[bytes, bytes]] = []
        self.special: dict[bytes, list[bytes]] = {}
        self.head_bytes = 0
        self.complete = False
        self.body: list[bytes] = []
        self.body_bytes = 0


class RequestReader:
    """One client's. Whoever owns it is told of each request's begin, of each whole head and whether the client waits to
    be told to go on, and gets each request, or the refusal that is the last thing to come.
    """

    def __init__(
        self,
        hub: Buffer,
        *,
        began: Callable[[], None],
        headed: Callable[[bool], None],
        came: Callable[[ClientRequest | Refused], None],
    ) -> None:
        self.deaf = False  # what comes from here on is not read
        self._hub = hub
        self._began = began
        self._headed = headed
        self._came = came
        self._parser: Any = httptools.HttpRequestParser(self)
        self._partial: _Partial | None = None
        self._refusal: Refused | None = None
        self._fed = 0  # bytes of a head, in the reads after its first

    @property
    def midway(self) -> bool:
        """A request has begun to come."""
        return self._partial is not None

    def feed(self, data: bytes) -> None:
        """What the client sent."""
        if self.deaf:
            return
        self._fed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.deaf = True  # the request stands; the protocol stays as it is
        except httptools.HttpParserError as exc:
            self.refuse(self._refusal or Refused(400, "bad_request", f"this is no HTTP/1.1 request: {exc}"))
        else:
            partial = self._partial
            if partial is not None and not partial.complete and self._fed > self._hub.limits.max_head_bytes:
                self.refuse(self._head_too_big())

    def refuse(self, refusal: Refused) -> None:
        """The answer to what is being read; nothing after it is read."""
        if not self.deaf:
            self.stop()
            self._came(refusal)

    def stop(self) -> None:
        """Read nothing more, and forget what has come in part."""
        self.deaf = True
        if self._partial is not None:
            self._hub.buffered_bytes -= self._partial.body_bytes
            self._partial = None

    # --- httptools' callbacks; raising is the only way to stop the parser

    def on_message_begin(self) -> None:
        """A request begins."""
        self._partial = _Partial()
        self._fed = 0
        self._began()

    def on_url(self, url: bytes) -> None:
        """Its target, or a piece of it."""
        if (partial := self._partial) is not None:
            partial.url += url
            partial.head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line, or a trailer, which is dropped."""
        partial = self._partial
        if partial is None or partial.complete:
            return
        lower = name.lower()
        partial.head_bytes += len(name) + len(value) + 4
        if lower in _READ:
            partial.special.setdefault(lower, []).append(value)
        if lower not in _DROPPED:
            partial.lines.append((lower, b"%b: %b\r\n" % (name, value)))

    def on_headers_complete(self) -> None:
        """The head is whole: refuse now what would be refused anyhow."""
        partial = self._partial
        assert partial is not None
        partial.complete = True
        self._refusal = self._fault_of(partial)
        if self._refusal is not None:
            raise self._refusal
        self._headed(b"expect" in partial.special)

    def on_body(self, chunk: bytes) -> None:
        """A piece of the body."""
        partial, hub = self._partial, self._hub
        assert partial is not None
        partial.body.append(chunk)
        partial.body_bytes += len(chunk)
        hub.buffered_bytes += len(chunk)
        if partial.body_bytes > hub.limits.max_body_bytes:
            self._refusal = self._body_too_big()
        elif hub.buffered_bytes > hub.limits.max_buffered_bytes:
            self._refusal = overloaded("too much is held for requests that are at work")
        if self._refusal is not None:
            raise self._refusal

    def on_message_complete(self) -> None:
        """The request is whole."""
        partial, self._partial = self._partial, None
        assert partial is not None
        keep_alive = self._parser.should_keep_alive() and not self._parser.should_upgrade()
        self.deaf = not keep_alive
        lines, nominated = partial.lines, _nominated(partial)
        if nominated:
            lines = [header for header in lines if header[0] not in nominated]
        authorization = partial.special.get(b"authorization")
        self._came(
            ClientRequest(
                method=self._parser.get_method(),
                url=partial.url,
                headers=b"".join([line for _, line in lines]),
                body=partial.body[0] if len(partial.body) == 1 else b"".join(partial.body),
                keep_alive=keep_alive,
                authorization=authorization[0] if authorization else None,
            )
        )

    # --- what is refused

    def _fault_of(self, partial: _Partial) -> Refused | None:
        limits, special = self._hub.limits, partial.special
        if self._parser.get_http_version() != "1.1":
            return Refused(505, "http_version", "this proxy speaks HTTP/1.1")
        if partial.head_bytes > limits.max_head_bytes or len(partial.lines) > _MAX_HEADERS:
            return self._head_too_big()
        if len(special.get(b"host", ())) != 1:
            return Refused(400, "bad_request", "a request has one Host header")
        if b"transfer-encoding" in special and not _all_are(special[b"transfer-encoding"], b"chunked"):
            return Refused(501, "transfer_encoding", "this proxy takes chunked bodies and plain ones")
        if b"expect" in special and not _all_are(special[b"expect"], b"100-continue"):
            return Refused(417, "expectation", "this proxy meets no expectation but 100-continue")
        if b"content-length" in special and int(special[b"content-length"][0]) > limits.max_body_bytes:
            return self._body_too_big()
        return None

    def _head_too_big(self) -> Refused:
        most = self._hub.limits.max_head_bytes
        return Refused(431, "head_too_big", f"a request's head has at most {most} bytes and {_MAX_HEADERS} headers")

    def _body_too_big(self) -> Refused:
        return Refused(413, "body_too_big", f"a request's body has at most {self._hub.limits.max_body_bytes} bytes")


def _all_are(values: list[bytes], only: bytes) -> bool:
    return all(value.strip().lower() == only for value in values)


def _nominated(partial: _Partial) -> set[bytes]:
    """Headers that the client meant for this connection alone."""
    values = partial.special.get(b"connection")
    if not values:
        return set()
    return {token.strip() for value in values for token in value.lower().split(b",")} - _KEEP
