"""An upstream, and the slots in it. One event loop owns all of this; nothing here awaits.

In-flight counts go up when a slot is granted and down exactly once, whatever ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Upstream:
    """A server that answers requests: `url` is its base, `headers` go with every request (its key, say)."""

    id: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: {self.url!r} of upstream {self.id!r} is no http(s)://host:port")

    def url_of(self, path: str) -> str:
        """The address of a path that starts with '/'."""
        return self.url.rstrip("/") + path


@dataclass(eq=False, slots=True)
class Run:
    """One request at work on one upstream.

    `born` is the upstream's generation at that time: a fault of an earlier one says nothing about the present one.
    """

    upstream: Upstream
    born: int
    scope: asyncio.Timeout | None = None
    aborted: bool = False

    @property
    def timed_out(self) -> bool:
        """The deadline around it passed, not one inside the transport."""
        return self.scope is not None and self.scope.expired()

    def abort(self) -> None:
        """End it now; its caller runs it again elsewhere."""
        self.aborted = True
        if self.scope is not None and not self.timed_out:
            self.scope.reschedule(0)


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
