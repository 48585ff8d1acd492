"""Which snapshots and leftovers to delete: pure functions of the ledger's rows and of what lies in a run's root.

Invariants: only our own exports (`staging`) are ever named; never one that is reserved, queued, leased, pinned, best or
held, nor one whose directory another such row uses; never one that has not settled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from eval_service.contract.wire import Source

PARTIAL_IDLE_S = 3600.0


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """A snapshot that is on storage, as the ledger knows it."""

    id: str
    run: str
    step: int
    digest: str
    path: str
    source: Source
    nonce: str | None
    reserved: bool = False
    queued: bool = False
    leased: bool = False
    pinned: bool = False
    best: bool = False
    held: bool = False
    settled_at: float | None = None  # Unix seconds; None: a suite is still open

    @property
    def in_use(self) -> bool:
        """Whether something still needs its directory."""
        return self.reserved or self.queued or self.leased or self.pinned or self.best or self.held


@dataclass(frozen=True, slots=True)
class Deletion:
    """A snapshot to delete, with all that must agree before it is."""

    id: str
    run: str
    step: int
    digest: str
    path: str
    nonce: str


class LeftoverKind(StrEnum):
    """What an ended process may leave in a run's root."""

    PARTIAL = "partial"  # an export that was never published
    TRASH = "trash"  # a deletion that was cut short
    HELD = "held"  # hard links that no point needs
    HALF = "half"  # a file beside its place, whose writer ended before the rename


@dataclass(frozen=True, slots=True)
class Leftover:
    """A directory in a run's root that is no snapshot (any more), or a file that was never put in its place."""

    run: str
    name: str  # relative to the run's root
    kind: LeftoverKind
    touched_at: float  # Unix seconds; the newest change in it


def plan_deletions(rows: Iterable[SnapshotRow], keep: Mapping[str, int]) -> tuple[Deletion, ...]:
    """The snapshots to delete, first settled first.

    Args:
        rows: every snapshot on storage, of all runs.
        keep: how many of the most recently settled to leave, by run; a run that is not in it keeps all.
    """
    rows = tuple(rows)
    settled: dict[str, list[SnapshotRow]] = defaultdict(list)
    for row in rows:
        if row.source is Source.STAGING and row.settled_at is not None and row.run in keep:
            settled[row.run].append(row)
    spare = [row for run, own in settled.items() for row in _beyond(own, keep[run])]
    spare_ids = {row.id for row in spare if not row.in_use}
    needed = {row.path for row in rows if row.id not in spare_ids}
    return tuple(
        Deletion(row.id, row.run, row.step, row.digest, row.path, row.nonce)
        for row in sorted(spare, key=_settled_order)
        if row.nonce is not None and row.path not in needed
    )


def plan_leftovers(
    found: Iterable[Leftover],
    reserved_runs: Collection[str],
    held: Collection[str] = (),
    *,
    now: float,
    idle_s: float = PARTIAL_IDLE_S,
) -> tuple[Leftover, ...]:
    """The leftovers to delete: all trash, links that nobody needs, and what nobody can be writing (any more).

    Args:
        reserved_runs: runs with a live reservation, whose trainer may be exporting.
        held: names of the directories of hard links that are needed.
        now: Unix seconds.
        idle_s: how long what is written must not have changed (an export may also run without a reservation).
    """
    return tuple(
        leftover
        for leftover in found
        if leftover.kind is LeftoverKind.TRASH
        or (leftover.kind is LeftoverKind.HELD and leftover.name not in held)
        or (
            now - leftover.touched_at >= idle_s
            and (
                leftover.kind is LeftoverKind.HALF
                or (leftover.kind is LeftoverKind.PARTIAL and leftover.run not in reserved_runs)
            )
        )
    )


def _beyond(rows: list[SnapshotRow], keep: int) -> list[SnapshotRow]:
    return sorted(rows, key=_settled_order, reverse=True)[keep:]


def _settled_order(row: SnapshotRow) -> tuple[float, int, str]:
    return (row.settled_at or 0.0, row.step, row.id)
