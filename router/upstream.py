"""An upstream, and the slots in it. One event loop owns all of this; nothing here awaits.

In-flight counts go up when a slot is granted and down exactly once, whatever ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from router.exchange import Exchange


@dataclass(frozen=True, slots=True)
class Origin:
    """Where connections go."""

    host: str
    port: int
    tls: bool


@dataclass(frozen=True, slots=True)
class Upstream:
    """A server that answers requests: `url` is its base, `headers` go with every request (its key, say).

    `proof` is raised by whoever proves it anew: an upstream told again with another proof is readmitted. `tells` are
    headers that a proxy puts on every answer of it: what it was proven to be, say.
    """

    id: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    proof: int = 0
    tells: Mapping[str, str] = field(default_factory=dict)
    origin: Origin = field(init=False, repr=False, compare=False)
    base: bytes = field(init=False, repr=False, compare=False)  # of the path, without a '/' at its end
    head: bytes = field(init=False, repr=False, compare=False)  # the header lines that every request carries
    tail: bytes = field(init=False, repr=False, compare=False)  # those that a proxy adds to every answer

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ValueError(f"url: {self.url!r} of upstream {self.id!r} is no http(s)://host:port")
        if not self.id.isprintable() or not self.id.isascii():
            raise ValueError(f"id: {self.id!r} has characters that no header may carry")
        tls = parts.scheme == "https"
        set_ = object.__setattr__
        set_(self, "origin", Origin(parts.hostname, parts.port or (443 if tls else 80), tls))
        set_(self, "base", parts.path.rstrip("/").encode())
        set_(self, "head", header_lines({"Host": parts.netloc, **self.headers}))
        set_(self, "tail", header_lines({"X-Router-Upstream": self.id, **self.tells}))


@dataclass(eq=False, slots=True)
class Run:
    """One request at work on one upstream.

    `born` is the upstream's generation at that time: a fault of an earlier one says nothing about the present one.
    """

    upstream: Upstream
    born: int
    exchange: Exchange | None = None
    aborted: bool = False

    def abort(self) -> None:
        """End it now; its caller runs it again elsewhere."""
        self.aborted = True
        if self.exchange is not None:
            self.exchange.abort()


@dataclass(eq=False, slots=True)
class Slots:
    """What the router knows of an upstream, over all targets."""

    upstream: Upstream
    targets: set[str] = field(default_factory=set)
    runs: set[Run] = field(default_factory=set)
    healthy: bool = True
    generation: int = 0
    faults_in_a_row: int = 0
    last_granted: int = 0
    granted: int = 0
    answered: int = 0
    faulted: int = 0
    freed: asyncio.Event | None = None  # somebody waits for runs to end

    @property
    def in_flight(self) -> int:
        """Requests at work on it."""
        return len(self.runs)

    def grant(self, sequence: int) -> Run:
        """Take a slot."""
        run = Run(self.upstream, self.generation)
        self.runs.add(run)
        self.last_granted = sequence
        self.granted += 1
        return run

    def renew(self, upstream: Upstream) -> None:
        """It is proven, or it is another server under the same name: forget what its former self did."""
        self.upstream = upstream
        self.healthy = True
        self.generation += 1
        self.faults_in_a_row = 0

    def succeeded(self, run: Run) -> None:
        """It answered, whatever the status below 500."""
        self.answered += 1
        if run.born == self.generation:
            self.faults_in_a_row = 0

    def failed(self, run: Run, eject_after: int) -> bool:
        """It met a fault; True if that ejects it now."""
        self.faulted += 1
        if run.born != self.generation or not self.healthy:
            return False
        self.faults_in_a_row += 1
        self.healthy = self.faults_in_a_row < eject_after
        return not self.healthy


def header_lines(headers: Mapping[str, str]) -> bytes:
    """Headers as they go over the wire.

    Raises:
        ValueError: one that would be more, or less, than one header line.
    """
    for name, value in headers.items():
        if not name.isascii() or not name.isprintable() or not name or set(name) & set(' :"(),/;<=>?@[\\]{}'):
            raise ValueError(f"headers: {name!r} is no header's name")
        if any(ord(char) < 32 or 126 < ord(char) < 160 or ord(char) > 255 for char in value.replace("\t", " ")):
            raise ValueError(f"headers: the value of {name!r} has characters that no header may carry")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")
