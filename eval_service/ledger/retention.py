"""What garbage collection reads and writes: which snapshots lie on storage, who needs them, and which are gone.

Invariant: a snapshot is claimed before its directory is touched, in one transaction with a last look at who needs it;
from then on a hold or a retry is refused, and a dispatch of the same path is checked as a new one.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, Select, case, delete, func, select, update

from eval_service.contract.manifest import Manifest
from eval_service.contract.states import ENDS, LIVE, PointState, Reason
from eval_service.contract.wire import DispatchRequest, Source
from eval_service.gc.plan import SnapshotRow
from eval_service.ledger.advising import best_snapshots
from eval_service.ledger.database import Database
from eval_service.ledger.events import prune
from eval_service.ledger.metering import count_collected
from eval_service.ledger.rows import sound
from eval_service.ledger.schema import attempts, commands, drains, links, points, runs, servings, snapshots
from eval_service.objects.urls import is_url

_ENDS = tuple(state.value for state in ENDS)
_LIVE = tuple(state.value for state in LIVE)


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Where a run lies, and how many of its snapshots are kept; 0 for one that is being deleted."""

    run: str
    root: Path
    keep: int
    deleting: bool = False
    collect_objects: bool = False


@dataclass(frozen=True, slots=True)
class Undescribed:
    """An export whose points ended before anybody looked into it: its nonce is still to be read."""

    id: str
    run: str
    step: int
    path: str
    digest: str


@dataclass(frozen=True, slots=True)
class Held:
    """Hard links to a snapshot of a run."""

    snapshot: str
    run: str
    path: str


class Retention:
    """The acting controller's view of what is on storage."""

    def __init__(self, database: Database, epoch: int) -> None:
        self._db = database
        self._epoch = epoch

    def places(self) -> list[RunPlace]:
        """Every run's place."""
        with self._db.reading() as connection:
            query = select(runs.c.run, runs.c.spec, runs.c.deleted_at).order_by(runs.c.created_at, runs.c.run)
            rows = connection.execute(query).mappings().all()
        return list(sound(rows, _place))

    def on_storage(self, pinned: Collection[str] = ()) -> list[SnapshotRow]:
        """Snapshots that were not deleted, with who needs them; those whose content nobody knows have no nonce.

        Args:
            pinned: directories that engines hold the weights of.
        """
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
            served = frozenset(connection.execute(_served()).scalars())
            reserved = {(run, step) for run, step in connection.execute(_RESERVED.distinct())}

        def make(row: RowMapping) -> SnapshotRow:
            return SnapshotRow(
                id=row["id"],
                run=row["run"],
                step=row["step"],
                digest=row["digest"] or row["claimed_digest"] or "",
                path=row["path"],
                source=Source(row["source"]),
                nonce=row["nonce"],
                reserved=(row["run"], row["step"]) in reserved,
                queued=bool(row["waiting"]),
                leased=bool(row["live"]) or row["id"] in served,
                pinned=row["path"] in pinned and row["run_deleted_at"] is None,
                best=row["id"] in best and row["run_deleted_at"] is None,
                held=row["held"],
                settled_at=row["settled_at"],
            )

        return list(sound(rows, make))

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
        return [Undescribed(r["id"], r["run"], r["step"], r["path"], r["claimed_digest"]) for r in rows]

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
                ~_to_come(),
                ~select(points.c.id).where(late).exists(),
                ~_served().where(points.c.snapshot_id == snapshot).exists(),
                ~select(commands.c.seq).where(commands.c.done_at.is_(None)).exists(),
            )
            return connection.execute(free.values(deleting_at=self._db.clock())).rowcount > 0

    def spare(self, snapshot: str) -> bool:
        """Whether `deleted` would be true now; nothing is written."""
        with self._db.looking(self._epoch) as connection:
            claimed = select(snapshots.c.id).where(snapshots.c.id == snapshot, snapshots.c.deleting_at.is_not(None))
            return connection.execute(claimed.where(~_to_come())).first() is not None

    def deleted(self, snapshot: str) -> bool:
        """It is gone for good; False where it was dispatched again, or an export that may find it began, meanwhile."""
        with self._db.acting(self._epoch) as connection:
            claimed = update(snapshots).where(snapshots.c.id == snapshot, snapshots.c.deleting_at.is_not(None))
            gone = connection.execute(claimed.where(~_to_come()).values(deleted_at=self._db.clock())).rowcount > 0
            if gone:
                count_collected(connection, snapshot, self._db.clock())
            return gone

    def needed(self, run: str) -> dict[str, bool]:
        """The names of a run's directories that are not deleted; false for those that are claimed for it.

        What lies in an object store, maybe under the same name, needs no directory.
        """
        query = select(snapshots.c.path, snapshots.c.deleting_at).where(snapshots.c.run == run)
        with self._db.reading() as connection:
            rows = connection.execute(query.where(snapshots.c.deleted_at.is_(None))).all()
        return {Path(path).name: deleting_at is None for path, deleting_at in rows if not is_url(path)}

    # --- hard links

    def held(self) -> list[Held]:
        """Every directory of hard links."""
        query = select(links.c.snapshot, snapshots.c.run, links.c.path)
        with self._db.reading() as connection:
            rows = connection.execute(query.join(snapshots, snapshots.c.id == links.c.snapshot)).all()
        return [Held(*row) for row in rows]

    def let_go(self) -> list[Held]:
        """Forget the links to snapshots that have settled and are not served, and return them; who comes to need one
        again holds and checks it anew."""
        query = select(links.c.snapshot, snapshots.c.run, links.c.path)
        query = query.join(snapshots, snapshots.c.id == links.c.snapshot)
        query = query.where(snapshots.c.settled_at.is_not(None), links.c.snapshot.not_in(_served()))
        with self._db.looking(self._epoch) as connection:  # most looks find nothing
            if connection.execute(query.limit(1)).first() is None:
                return []
        with self._db.acting(self._epoch) as connection:
            found = [Held(*row) for row in connection.execute(query).all()]
            of_them = [held.snapshot for held in found]
            connection.execute(delete(links).where(links.c.snapshot.in_(of_them)))
            connection.execute(update(snapshots).where(snapshots.c.id.in_(of_them)).values(admitted_at=None))
        return found

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
            connection.execute(delete(servings).where(servings.c.point.in_(of_run)))
            connection.execute(delete(points).where(points.c.run == run))
            of_it = select(snapshots.c.id).where(snapshots.c.run == run)
            connection.execute(delete(links).where(links.c.snapshot.in_(of_it)))
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


_RESERVED = select(points.c.run, points.c.step).where(points.c.state == PointState.RESERVED)


def _to_come() -> ColumnElement[bool]:
    """Whether an export is under way that may come to the same content, and would then find the directory there."""
    of_it = (points.c.run == snapshots.c.run) & (points.c.step == snapshots.c.step)
    return _RESERVED.where(of_it).correlate(snapshots).exists()


def _place(row: RowMapping) -> RunPlace:
    spec, deleting = json.loads(row["spec"]), row["deleted_at"] is not None
    keep = 0 if deleting else int(spec["keep"])
    return RunPlace(row["run"], Path(str(spec["root"])), keep, deleting, bool(spec.get("collect_objects")))


def _served() -> Select[Any]:
    """Snapshots that are served to people."""
    return select(points.c.snapshot_id).join(servings, servings.c.point == points.c.id)
