"""What garbage collection reads and writes: which snapshots lie on storage, who needs them, and which are gone.

Invariant: a snapshot is claimed before its directory is touched, in one transaction with a last look at who needs it;
from then on a hold or a retry is refused, and a dispatch of the same path is checked as a new one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import case, delete, func, select, update

from eval_service.contract.manifest import Manifest
from eval_service.contract.states import ENDS, LIVE, PointState, Reason
from eval_service.contract.wire import DispatchRequest, Source
from eval_service.gc.plan import SnapshotRow
from eval_service.ledger.advising import best_snapshots
from eval_service.ledger.database import Database
from eval_service.ledger.events import prune
from eval_service.ledger.schema import attempts, commands, drains, points, runs, snapshots

_ENDS = tuple(state.value for state in ENDS)
_LIVE = tuple(state.value for state in LIVE)


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Where a run lies, and how many of its snapshots are kept; 0 for one that is being deleted."""

    run: str
    root: Path
    keep: int
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class Undescribed:
    """An export whose points ended before anybody looked into it: its nonce is still to be read."""

    id: str
    run: str
    step: int
    path: Path
    digest: str


class Retention:
    """The acting controller's view of what is on storage."""

    def __init__(self, database: Database, epoch: int) -> None:
        self._db = database
        self._epoch = epoch

    def places(self) -> list[RunPlace]:
        """Every run's place."""
        with self._db.reading() as connection:
            rows = connection.execute(select(runs.c.run, runs.c.spec, runs.c.deleted_at)).all()
        return [_place(run, json.loads(spec), deleted_at is not None) for run, spec, deleted_at in rows]

    def on_storage(self) -> list[SnapshotRow]:
        """Snapshots that were not deleted, with who needs them; those whose content nobody knows have no nonce."""
        live = func.sum(case((points.c.state.in_(_LIVE), 1), else_=0))
        waiting = func.sum(case((points.c.state.not_in((*_ENDS, *_LIVE)), 1), else_=0))
        query = (
            select(snapshots, live.label("live"), waiting.label("waiting"), runs.c.deleted_at.label("run_deleted_at"))
            .join(runs, runs.c.run == snapshots.c.run)
            .outerjoin(points, points.c.snapshot_id == snapshots.c.id)
            .where(snapshots.c.deleted_at.is_(None))
            .group_by(snapshots.c.id, runs.c.deleted_at)
        )
        with self._db.reading() as connection:
            rows = connection.execute(query).mappings().all()
            best = best_snapshots(connection)
        return [
            SnapshotRow(
                id=row["id"],
                run=row["run"],
                step=row["step"],
                digest=row["digest"] or row["claimed_digest"] or "",
                path=row["path"],
                source=Source(row["source"]),
                nonce=row["nonce"],
                queued=bool(row["waiting"]),
                leased=bool(row["live"]),
                best=row["id"] in best and row["run_deleted_at"] is None,
                held=row["held"],
                settled_at=row["settled_at"],
            )
            for row in rows
        ]

    def undescribed(self) -> list[Undescribed]:
        """Settled exports of ours that never were checked."""
        query = select(snapshots).where(
            snapshots.c.source == Source.STAGING,
            snapshots.c.settled_at.is_not(None),
            snapshots.c.deleted_at.is_(None),
            snapshots.c.nonce.is_(None),
            snapshots.c.claimed_digest.is_not(None),
        )
        with self._db.reading() as connection:
            rows = connection.execute(query).mappings().all()
        return [Undescribed(r["id"], r["run"], r["step"], Path(r["path"]), r["claimed_digest"]) for r in rows]

    def describe(self, snapshot: Undescribed, manifest: Manifest) -> bool:
        """Keep the nonce of an export, if the manifest is that of what was dispatched; returns whether it is."""
        if (manifest.run, manifest.step, manifest.digest) != (snapshot.run, snapshot.step, snapshot.digest):
            return False
        with self._db.acting(self._epoch) as connection:
            of_it = update(snapshots).where(snapshots.c.id == snapshot.id, snapshots.c.nonce.is_(None))
            connection.execute(of_it.values(nonce=manifest.nonce, digest=manifest.digest))
        return True

    def claim(self, snapshot: str) -> bool:
        """Take a snapshot for deletion; False where somebody has come to need it, or may by a command under way.

        After a power cut the ledger must still have the result that made its snapshot needless.
        """
        with self._db.acting(self._epoch, durable=True) as connection:
            needed = select(points.c.id).where(points.c.snapshot_id == snapshot, points.c.state.not_in(_ENDS))
            late = (points.c.snapshot_id == snapshot) & (points.c.reason == Reason.RESERVATION_EXPIRED)
            free = update(snapshots).where(
                snapshots.c.id == snapshot,
                snapshots.c.held.is_(False),
                snapshots.c.settled_at.is_not(None),
                ~needed.exists(),
                ~select(points.c.id).where(late).exists(),
                ~select(commands.c.seq).where(commands.c.done_at.is_(None)).exists(),
            )
            return connection.execute(free.values(deleting_at=self._db.clock())).rowcount > 0

    def deleted(self, snapshot: str) -> None:
        """It is gone; one that was dispatched again meanwhile is left to its checks."""
        with self._db.acting(self._epoch) as connection:
            claimed = update(snapshots).where(snapshots.c.id == snapshot, snapshots.c.deleting_at.is_not(None))
            connection.execute(claimed.values(deleted_at=self._db.clock()))

    def forget(self, run: str) -> bool:
        """Drop what the ledger has of a deleted run, once all has ended; receipts stay. False: not yet."""
        of_run = select(points.c.id).where(points.c.run == run)
        asked = select(runs.c.run).where(runs.c.run == run, runs.c.deleted_at.is_not(None))
        still_open = of_run.where(points.c.state.not_in(_ENDS)).limit(1)
        with self._db.acting(self._epoch) as connection:
            if connection.execute(asked).first() is None or connection.execute(still_open).first() is not None:
                return False
            connection.execute(delete(attempts).where(attempts.c.point.in_(of_run)))
            connection.execute(delete(commands).where(commands.c.target.in_(of_run)))
            connection.execute(delete(points).where(points.c.run == run))
            connection.execute(delete(snapshots).where(snapshots.c.run == run))
            connection.execute(delete(drains).where(drains.c.run == run, drains.c.ended_at.is_(None)))
            connection.execute(delete(runs).where(runs.c.run == run))
            return True

    def tend(self) -> None:
        """Bring what was committed to where a power cut can't take it."""
        self._db.checkpoint()

    def forget_events(self) -> None:
        """Drop all but the newest events."""
        with self._db.acting(self._epoch) as connection:
            prune(connection)

    def reserved_runs(self) -> frozenset[str]:
        """Runs whose trainer may be exporting."""
        query = select(points.c.run).where(points.c.state == PointState.RESERVED).distinct()
        with self._db.reading() as connection:
            return frozenset(connection.execute(query).scalars())

    def has(self, request: DispatchRequest) -> bool:
        """Whether the ledger has this reservation with its snapshot."""
        with self._db.reading() as connection:
            query = select(points.c.snapshot_id).where(points.c.reservation == request.reservation)
            rows = connection.execute(query).scalars().all()
        return bool(rows) and None not in rows


def _place(run: str, spec: dict[str, object], deleting: bool) -> RunPlace:
    return RunPlace(run, Path(str(spec["root"])), 0 if deleting else int(str(spec["keep"])), deleting)
