"""Requests as they came, answers as they go out, and the one envelope that every error of ours has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from router.errors import RouterError
from router.exchange import Header

_START = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_BODYLESS = frozenset({204, 304})
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
_RETRY = {"Retry-After": "1"}


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One whole request. `headers` are lines that may go to an upstream as they are."""

    method: bytes
    url: bytes
    headers: bytes
    body: bytes
    keep_alive: bool
    authorization: bytes | None


@dataclass(frozen=True, slots=True)
class Response:
    """One whole answer."""

    status: int
    lines: bytes
    body: bytes

    def rendered(self, *, close: bool, head_only: bool = False) -> bytes:
        """As it goes over the wire."""
        length = b"" if self.status in _BODYLESS else b"Content-Length: %d\r\n" % len(self.body)
        end = b"Connection: close\r\n\r\n" if close else b"\r\n"
        body = b"" if head_only else self.body
        return b"".join((start_line(self.status), self.lines, length, end, body))


class Refused(Exception):
    """The proxy's own answer to a request that goes to no upstream, or came back from none."""

    def __init__(
        self, status: int, code: str, message: str, *, hint: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.hint = hint
        self.headers = {} if headers is None else headers

    def response(self) -> Response:
        """{error: {code, message, hint?}}."""
        error = {"code": self.code, "message": str(self)} | ({"hint": self.hint} if self.hint else {})
        lines = {"Content-Type": "application/json", **self.headers}
        told = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode()
        return Response(self.status, told, json.dumps({"error": error}).encode())


def refusal_of(error: RouterError) -> Refused:
    """What a client is told of an error of the router's."""
    return Refused(error.status, error.code, str(error), headers=_RETRY if error.status in (429, 503) else None)


def overloaded(message: str) -> Refused:
    """A bound of the proxy's own is reached."""
    return Refused(503, "overloaded", message, headers=_RETRY)


def start_line(status: int) -> bytes:
    """HTTP/1.1, the status and its name."""
    return _START.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status


def passed_lines(tail: bytes, headers: list[Header]) -> bytes:
    """An upstream's headers as the client gets them, and who it was (`Upstream.tail`)."""
    return b"".join([line for _, line in headers]) + tail


def passed_head(status: int, lines: bytes, length: int | None, *, close: bool) -> bytes:
    """The head of an answer whose body is passed on as it comes; `length` None: in chunks."""
    framing = b"Transfer-Encoding: chunked\r\n" if length is None else b"Content-Length: %d\r\n" % length
    return b"".join((start_line(status), lines, framing, b"Connection: close\r\n\r\n" if close else b"\r\n"))


def chunk_of(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)
