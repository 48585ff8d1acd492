"""Points whose snapshot is served to people, rather than evaluated: who asked for it, until when, and what came of it.

A serving is a mark beside a point that has ended; it moves no point, and neither curve, bound nor drain counts it. Its
snapshot is kept from garbage collection. It ends by its time, by `close`, or with a retry of its point.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import RowMapping, Select, and_, delete, insert, select, update

from eval_service.contract.errors import Conflict, NotFound
from eval_service.contract.manifest import Manifest
from eval_service.ledger.commands import with_snapshot
from eval_service.ledger.database import Database
from eval_service.ledger.moves import Runnable, is_open, runnable_of, runnables
from eval_service.ledger.schema import points, runs, servings, snapshots
from eval_service.ledger.turn import END_STATES


@dataclass(frozen=True, slots=True)
class ServingRow:
    """A serving as the ledger has it."""

    point: str
    until: float
    closed: bool
    engines: int
    weight_version: str | None
    detail: str | None


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the acting controller tells of a serving."""

    engines: int
    weight_version: str | None
    detail: str | None


class Servings:
    """The gateway's side."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def open(self, point: str, for_s: float) -> None:
        """Serve a point's snapshot from now on for so long; one that is served already gets the new time.

        Raises:
            NotFound: no such point.
            Conflict: it has not ended, or its snapshot can't be served.
        """
        with self._db.writing() as connection:
            row = connection.execute(with_snapshot().where(points.c.id == point)).mappings().one_or_none()
            if row is None:
                raise NotFound(f"no point {point}", field="id")
            query = select(snapshots.c.manifest).where(snapshots.c.id == row["snapshot_id"])
            _check(row, known=connection.execute(query).scalar_one_or_none() is not None)
            now = self._db.clock()
            given = {"until": now + for_s, "closed_at": None}
            if connection.execute(update(servings).where(servings.c.point == point).values(**given)).rowcount == 0:
                connection.execute(insert(servings).values(point=point, asked_at=now, engines=0, **given))

    def close(self, point: str) -> None:
        """End a serving.

        Raises:
            NotFound: it is not served.
        """
        with self._db.writing() as connection:
            served = update(servings).where(servings.c.point == point)
            if connection.execute(served.values(closed_at=self._db.clock())).rowcount == 0:
                raise _not_served(point)

    def find(self, point: str) -> ServingRow | None:
        """A serving that is open or being closed."""
        with self._db.reading() as connection:
            row = connection.execute(select(servings).where(servings.c.point == point)).mappings().one_or_none()
        if row is None:
            return None
        names = ("point", "until", "engines", "weight_version", "detail")
        return ServingRow(**{name: row[name] for name in names}, closed=row["closed_at"] is not None)

    def get(self, point: str) -> ServingRow:
        """As `find`.

        Raises:
            NotFound: it is not served.
        """
        row = self.find(point)
        if row is None:
            raise _not_served(point)
        return row


class ServingMoves:
    """The acting controller's side."""

    def __init__(self, database: Database, epoch: int) -> None:
        self._db = database
        self.epoch = epoch

    def look(self) -> tuple[list[Runnable], list[str]]:
        """What is to be served now; and the points whose serving has ended, by whatever it was.

        One whose snapshot is being checked anew, since nobody has held it since its point ended, is neither.
        """
        with self._db.looking(self.epoch) as connection:
            marked = list(connection.execute(select(servings.c.point)).scalars())
            live = _live(self._db.clock()).add_columns(snapshots.c.admitted_at)
            rows = connection.execute(live).mappings().all() if marked else ()
        over = set(marked) - {row["id"] for row in rows}
        return [runnable_of(row) for row in rows if row["admitted_at"] is not None], sorted(over)

    def manifest(self, point: str) -> Manifest:
        """Of a point's snapshot."""
        query = select(snapshots.c.manifest).join(points, points.c.snapshot_id == snapshots.c.id)
        with self._db.reading() as connection:
            return Manifest.model_validate_json(connection.execute(query.where(points.c.id == point)).scalar_one())

    def forget(self, over: Collection[str]) -> None:
        """Drop what has ended, unless it was opened anew meanwhile."""
        with self._db.acting(self.epoch) as connection:
            live = set(connection.execute(_live(self._db.clock()).with_only_columns(points.c.id)).scalars())
            connection.execute(delete(servings).where(servings.c.point.in_(set(over) - live)))

    def note(self, point: str, outlook: Outlook) -> None:
        """Tell how a serving does."""
        told = {"engines": outlook.engines, "weight_version": outlook.weight_version, "detail": outlook.detail}
        with self._db.acting(self.epoch) as connection:
            connection.execute(update(servings).where(servings.c.point == point).values(**told))


def _live(now: float) -> Select[Any]:
    there = and_(snapshots.c.deleting_at.is_(None), runs.c.deleted_at.is_(None))
    query = runnables().join(servings, servings.c.point == points.c.id)
    return query.where(is_open(now), there).order_by(servings.c.asked_at)


def _check(row: RowMapping, *, known: bool) -> None:
    if row["state"] not in END_STATES:
        hint = "a lane is driven by the controller or by the proxy: wait until it has ended, or cancel it"
        raise Conflict(f"the point is {row['state']}", field="id", hint=hint)
    if row["run_deleted_at"] is not None:
        raise Conflict("its run is being deleted", field="id")
    if row["deleting_at"] is not None or row["deleted_at"] is not None:
        raise Conflict(f"its snapshot {row['path']} was deleted", field="id", hint="hold a snapshot to keep it")
    if not known:
        raise Conflict("no snapshot of it has passed the checks", field="id", hint="`evalfleet doctor` tells why")


def _not_served(point: str) -> NotFound:
    return NotFound(f"point {point} is not served", field="id", hint=f"POST /points/{point}/serve")
