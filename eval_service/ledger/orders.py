"""What people make gateways write: retry, cancel, backfill, hold, release, pause, resume, delete; and a failed export.

What moves a point is written as a command, which the controller carries out; the rest are marks that it reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, RowMapping, select, update

from eval_service.contract.errors import Conflict, NotFound
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import LeftPoint, PointRef, RunCommandReply
from eval_service.ledger.commands import Command, give, objection, with_snapshot
from eval_service.ledger.database import Database
from eval_service.ledger.intents import run_row
from eval_service.ledger.receipts import current
from eval_service.ledger.schema import points, runs, snapshots
from eval_service.ledger.turn import END_STATES
from eval_service.objects.urls import is_url


@dataclass(frozen=True, slots=True)
class Asked:
    """Commands that were written; `numbers` tell later whether they are carried out."""

    reply: RunCommandReply
    numbers: tuple[int, ...]


class Orders:
    """The gateway's commands."""

    def __init__(self, database: Database) -> None:
        self._db = database

    # --- a point

    def report_export_failed(self, point: str, detail: str, reason: Reason = Reason.EXPORT_FAILED) -> tuple[int, ...]:
        """Say that a reserved point gets no snapshot: its export failed, or (`busy`) its turn never came.

        One that was skipped meanwhile is left as it is.

        Raises:
            NotFound: no such point.
            Conflict: it is not reserved (any more).
        """
        kind = Command.EXPORTER_BUSY if reason is Reason.BUSY else Command.EXPORT_FAILED
        return self._order(kind, point, detail, already=PointState.SKIPPED)

    def cancel(self, point: str) -> tuple[int, ...]:
        """Take a point back; one that is cancelled is left as it is.

        Raises:
            NotFound: no such point.
            Conflict: it has ended otherwise.
        """
        return self._order(Command.CANCEL, point, "cancelled by a user", already=PointState.CANCELLED)

    def place_of(self, point: str) -> frozenset[str]:
        """The directory that a retry of a point needs, if it has one.

        Raises:
            NotFound: no such point.
        """
        with self._db.reading() as connection:
            return _places([_point(connection, point)])

    def places_of(self, run: str) -> frozenset[str]:
        """The directories that a backfill of a run needs."""
        with self._db.reading() as connection:
            return _places(_lacking(connection, run))

    def retry(self, point: str, gone: Collection[str] = ()) -> tuple[int, ...]:
        """A new attempt of an ended point, while its snapshot is there.

        Args:
            gone: directories that are not there; see `not_on_storage`.

        Raises:
            NotFound: no such point.
            Conflict: it has not ended, is done, a newer one counts, or its snapshot is not there.
        """
        with self._db.writing() as connection:
            row = _point(connection, point)
            _refuse(objection(Command.RETRY, row) or _is_gone(row, gone))
            return (give(connection, Command.RETRY, point, None, self._db.clock()),)

    def hold(self, point: str) -> None:
        """Keep a point's snapshot from garbage collection, until it is released.

        Raises:
            NotFound: no such point.
            Conflict: it has no snapshot, or it was deleted.
        """
        with self._db.writing() as connection:
            row = _point(connection, point)
            if row["snapshot_id"] is None:
                raise Conflict("no snapshot of it came yet", field="id")
            if row["deleting_at"] is not None or row["run_deleted_at"] is not None:
                raise Conflict(f"its snapshot {row['path']} is deleted", field="id")
            _mark(connection, row, held=True)

    def release(self, point: str) -> None:
        """Give a held snapshot back to garbage collection.

        Raises:
            NotFound: no such point.
        """
        with self._db.writing() as connection:
            _mark(connection, _point(connection, point), held=False)

    # --- a run

    def pause(self, run: str) -> None:
        """Start no further lanes of a run; what runs goes on, and dispatches are taken in."""
        self._mark_run(run, paused=True)

    def resume(self, run: str) -> None:
        """End a pause; what is queued has all its time again."""
        with self._db.writing() as connection:
            if run_row(connection, run, to_change=True)["paused"]:
                values = {"paused": False, "resumed_at": self._db.clock()}
                connection.execute(update(runs).where(runs.c.run == run).values(**values))

    def cancel_run(self, run: str) -> Asked:
        """Take back every point of a run that has not ended."""
        with self._db.writing() as connection:
            run_row(connection, run)
            query = with_snapshot().where(points.c.run == run, points.c.state.not_in(END_STATES))
            rows = connection.execute(query.order_by(points.c.seq)).mappings().all()
            return self._give_all(connection, run, Command.CANCEL, rows, "the run was cancelled by a user")

    def backfill(self, run: str, gone: Collection[str] = ()) -> Asked:
        """Retry what was skipped or failed and counts, while its snapshot is there; tell what was left, and why.

        Args:
            gone: directories that are not there; see `not_on_storage`.
        """
        with self._db.writing() as connection:
            run_row(connection, run, to_change=True)
            lacking = _lacking(connection, run)
            why = {row["id"]: objection(Command.RETRY, row) or _is_gone(row, gone) for row in lacking}
            able = [row for row in lacking if why[row["id"]] is None]
            left = tuple(
                LeftPoint(point=row["id"], step=row["step"], suite=row["suite"], why=found[0])
                for row in lacking
                if (found := why[row["id"]]) is not None
            )
            return self._give_all(connection, run, Command.RETRY, able, None, left)

    def delete_run(self, run: str) -> None:
        """Delete a run: its open points are cancelled, then its results and our own snapshots of it go.

        Raises:
            NotFound: no such run.
            Conflict: somebody holds a snapshot of it.
        """
        with self._db.writing() as connection:
            if run_row(connection, run)["deleted_at"] is not None:
                return
            held = select(snapshots.c.step).where(snapshots.c.run == run, snapshots.c.held.is_(True))
            step = connection.execute(held.where(snapshots.c.deleted_at.is_(None)).limit(1)).scalar_one_or_none()
            if step is not None:
                hint = "release it first: POST /points/{id}/release"
                raise Conflict(f"the snapshot of step {step} is held", field="run", hint=hint)
            connection.execute(update(runs).where(runs.c.run == run).values(deleted_at=self._db.clock()))

    # --- how

    def _order(self, kind: Command, point: str, detail: str, *, already: PointState) -> tuple[int, ...]:
        with self._db.writing() as connection:
            row = _point(connection, point)
            if row["state"] == already:
                return ()
            _refuse(objection(kind, row))
            return (give(connection, kind, point, detail, self._db.clock()),)

    def _give_all(
        self,
        connection: Connection,
        run: str,
        kind: Command,
        rows: Sequence[RowMapping],
        detail: str | None,
        left: tuple[LeftPoint, ...] = (),
    ) -> Asked:
        numbers = tuple(give(connection, kind, row["id"], detail, self._db.clock()) for row in rows)
        return Asked(RunCommandReply(run=run, points=tuple(_refs(rows)), left=left), numbers)

    def _mark_run(self, run: str, **values: object) -> None:
        with self._db.writing() as connection:
            run_row(connection, run, to_change=True)
            connection.execute(update(runs).where(runs.c.run == run).values(**values))


def _point(connection: Connection, point: str) -> RowMapping:
    row = connection.execute(with_snapshot().where(points.c.id == point)).mappings().one_or_none()
    if row is None:
        raise NotFound(f"no point {point}", field="id")
    return row


def _refuse(why: tuple[str, str | None] | None) -> None:
    if why is not None:
        raise Conflict(why[0], field="id", hint=why[1])


def _lacking(connection: Connection, run: str) -> list[RowMapping]:
    rows = connection.execute(with_snapshot().where(points.c.run == run)).mappings().all()
    return [row for row in current(rows) if row["state"] in (PointState.SKIPPED, PointState.FAILED)]


def not_on_storage(places: Collection[str]) -> frozenset[str]:
    """Those of some directories that are not there: what is gone is told now, and not after an attempt.

    It blocks for as long as the file system does, so it is never called within a transaction.
    """
    return frozenset(place for place in places if not is_url(place) and not Path(place).is_dir())


def _places(rows: Iterable[RowMapping]) -> frozenset[str]:
    return frozenset(row["path"] for row in rows if row["path"] is not None)


def _is_gone(row: RowMapping, gone: Collection[str]) -> tuple[str, str | None] | None:
    if row["path"] not in gone:
        return None
    return f"its snapshot {row['path']} is not there", "export the step again and dispatch it"


def _mark(connection: Connection, row: RowMapping, *, held: bool) -> None:
    connection.execute(update(snapshots).where(snapshots.c.id == row["snapshot_id"]).values(held=held))


def _refs(rows: Iterable[RowMapping]) -> Iterable[PointRef]:
    return (
        PointRef(id=row["id"], suite=row["suite"], state=row["state"], reason=row["reason"], detail=row["detail"])
        for row in rows
    )
