"""What the router can tell of itself, as values at one moment: for metrics pages and fleet views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from router.faults import FaultKind


@dataclass(frozen=True, slots=True)
class UpstreamStats:
    """One upstream, over all targets."""

    in_flight: int
    healthy: bool
    granted: int
    answered: int
    faulted: int


@dataclass(frozen=True, slots=True)
class TargetStats:
    """One target's gate. `peak` is the most requests that were ever in flight."""

    upstreams: tuple[str, ...]
    in_flight: int
    waiting: int
    capacity: int
    peak: int


@dataclass(slots=True)
class Totals:
    """Counts since the router was made."""

    answered: int = 0
    replayed: int = 0
    refused: int = 0  # QueueFull
    waited_out: int = 0  # NoUpstream and WaitTimeout
    failed: int = 0  # UpstreamFailed
    left: int = 0  # the caller went away
    ejections: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """All of it."""

    targets: Mapping[str, TargetStats]
    upstreams: Mapping[str, UpstreamStats]
    totals: Totals
    faults: Mapping[FaultKind, int]
