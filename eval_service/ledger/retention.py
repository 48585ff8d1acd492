"""What garbage collection reads and writes: which snapshots lie on storage, who needs them, and which are gone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import case, func, select, update

from eval_service.contract.states import ENDS, LIVE, PointState, Reason
from eval_service.contract.wire import DispatchRequest, Source
from eval_service.gc.plan import SnapshotRow
from eval_service.ledger.database import Database
from eval_service.ledger.schema import points, runs, snapshots

_ENDS = tuple(state.value for state in ENDS)
_LIVE = tuple(state.value for state in LIVE)


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Where a run lies, and how many of its snapshots are kept."""

    run: str
    root: Path
    keep: int


class Retention:
    """The acting controller's view of what is on storage."""

    def __init__(self, database: Database, epoch: int) -> None:
        self._db = database
        self._epoch = epoch

    def places(self) -> list[RunPlace]:
        """Every run's place."""
        with self._db.reading() as connection:
            rows = connection.execute(select(runs.c.run, runs.c.spec)).all()
        specs = [(run, json.loads(spec)) for run, spec in rows]
        return [RunPlace(run, Path(spec["root"]), spec["keep"]) for run, spec in specs]

    def on_storage(self) -> list[SnapshotRow]:
        """Admitted snapshots that were not deleted, with who needs them."""
        live = func.sum(case((points.c.state.in_(_LIVE), 1), else_=0))
        waiting = func.sum(case((points.c.state.not_in((*_ENDS, *_LIVE)), 1), else_=0))
        query = (
            select(snapshots, live.label("live"), waiting.label("waiting"))
            .outerjoin(points, points.c.snapshot_id == snapshots.c.id)
            .where(snapshots.c.deleted_at.is_(None), snapshots.c.admitted_at.is_not(None))
            .group_by(snapshots.c.id)
        )
        with self._db.reading() as connection:
            rows = connection.execute(query).mappings().all()
        return [
            SnapshotRow(
                id=row["id"],
                run=row["run"],
                step=row["step"],
                digest=row["digest"],
                path=row["path"],
                source=Source(row["source"]),
                nonce=row["nonce"],
                queued=bool(row["waiting"]),
                leased=bool(row["live"]),
                held=row["held"],
                settled_at=row["settled_at"],
            )
            for row in rows
        ]

    def deleted(self, snapshot: str) -> None:
        """It is gone."""
        with self._db.acting(self._epoch) as connection:
            connection.execute(update(snapshots).where(snapshots.c.id == snapshot).values(deleted_at=self._db.clock()))

    def reserved_runs(self) -> frozenset[str]:
        """Runs whose trainer may be exporting."""
        query = select(points.c.run).where(points.c.state == PointState.RESERVED).distinct()
        with self._db.reading() as connection:
            return frozenset(connection.execute(query).scalars())

    def has(self, request: DispatchRequest) -> bool:
        """Whether the ledger has this reservation with its snapshot, or has ended it for good."""
        columns = (points.c.snapshot_id, points.c.state, points.c.reason)
        with self._db.reading() as connection:
            rows = connection.execute(select(*columns).where(points.c.reservation == request.reservation)).all()
        return bool(rows) and not any(
            snapshot is None and (state not in _ENDS or reason == Reason.RESERVATION_EXPIRED)
            for snapshot, state, reason in rows
        )
