"""One request's wire exchange with one upstream: what comes back is held until it is whole, or passed on as it comes.

Invariants: `done` gets one outcome, never an exception. Once anything was passed on, `passed_on` is True and the
request can't be run again. A 5xx is never passed on, nor is a body that nothing would show to be cut short.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from router.faults import Broken, FaultKind

Header = tuple[bytes, bytes]  # its name in lower case, and its line
MAX_ERROR_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Reply:
    """What one upstream answered. `body` is empty where it was passed on."""

    status: int
    headers: list[Header]
    body: bytes


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent, but for the upstream's part of it: `headers` are whole lines, `path` may carry a query."""

    method: bytes
    path: bytes
    headers: bytes
    body: bytes


class Wire(Protocol):
    """The connection below an exchange."""

    def pause_reading(self) -> None:
        """Read no more of the answer for now."""

    def resume_reading(self) -> None:
        """Read on."""


class Outlet(Protocol):
    """Where an answer goes that is passed on while it comes."""

    def holds(self, length: int | None) -> bool:
        """Is a body of so many bytes (None: it isn't said) to be held until it is whole?"""

    def begin(self, exchange: Exchange, status: int, headers: list[Header], length: int | None) -> None:
        """The head is here."""

    def data(self, chunk: bytes) -> None:
        """A piece of the body is here."""

    def end(self) -> None:
        """The body is whole."""

    @property
    def slow(self) -> bool:
        """It waits for whoever takes the answer, so that the upstream can't be blamed for the time."""


class Exchange:
    """Made for one run; the connection tells it what comes."""

    __slots__ = (
        "_held",
        "_held_bytes",
        "aborted",
        "done",
        "expired",
        "headers",
        "outlet",
        "passed_on",
        "status",
        "tail",
        "upstream",
        "wire",
    )

    def __init__(
        self,
        upstream: str,
        done: asyncio.Future[Reply | Broken],
        outlet: Outlet | None = None,
        tail: bytes = b"",
    ) -> None:
        self.upstream = upstream
        self.tail = tail  # header lines to add for a client
        self.done = done
        self.outlet = outlet
        self.passed_on = False
        self.expired = False
        self.aborted = False
        self.status = 0
        self.headers: list[Header] = []
        self.wire: Wire | None = None
        self._held: list[bytes] = []
        self._held_bytes = 0

    @property
    def outlet_is_slow(self) -> bool:
        """Whoever takes the answer holds it up."""
        return self.passed_on and self.outlet is not None and self.outlet.slow

    def head(self, status: int, headers: list[Header], length: int | None) -> None:
        """The answer's status and headers; `length` is None for a chunked body."""
        self.status, self.headers = status, headers
        if self.outlet is not None and status < 500 and not self.outlet.holds(length):
            self.passed_on = True
            self.outlet.begin(self, status, headers, length)

    def data(self, chunk: bytes) -> None:
        """A piece of the body."""
        if self.passed_on and self.outlet is not None:
            self.outlet.data(chunk)
        elif self.status < 500 or self._held_bytes < MAX_ERROR_BYTES:
            self._held.append(chunk)
            self._held_bytes += len(chunk)

    def end(self) -> None:
        """The answer is whole."""
        if self.done.done():
            return
        if self.passed_on and self.outlet is not None:
            self.outlet.end()
        held = self._held
        self.done.set_result(Reply(self.status, self.headers, held[0] if len(held) == 1 else b"".join(held)))

    def broke(self, why: Broken) -> None:
        """There will be no whole answer."""
        if not self.done.done():
            self.done.set_result(why)

    def expire(self) -> None:
        """Its time is up."""
        if not self.done.done():
            self.expired = True
            self.broke(Broken(FaultKind.TIMEOUT, "it was still at work when the time was up"))

    def abort(self) -> None:
        """Nobody wants it from there any more."""
        if not self.done.done():
            self.aborted = True
            self.broke(Broken(FaultKind.DISCONNECTED, "aborted by us"))
