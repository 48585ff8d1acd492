"""What is counted for operators: kept in the ledger, so that every gateway tells the same, also after a restart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, func, select

from eval_service.contract.manifest import Manifest
from eval_service.contract.states import PointState
from eval_service.ledger.database import COLLECTED, Database, put
from eval_service.ledger.schema import drains, meta, points, snapshots

_SLACK_S = 60.0


def count_collected(connection: Connection, snapshot: str, now: float) -> None:
    """A snapshot was deleted from storage: add it to what was collected since the ledger was made."""
    text = connection.execute(select(snapshots.c.manifest).where(snapshots.c.id == snapshot)).scalar()
    kept = connection.execute(select(meta.c.value).where(meta.c.key == COLLECTED)).scalar()
    counts = json.loads(kept) if kept else {"snapshots": 0, "bytes": 0}
    counts = {"snapshots": counts["snapshots"] + 1, "bytes": counts["bytes"] + _size_bytes(text)}
    put(connection, COLLECTED, json.dumps(counts), now)


def _size_bytes(manifest: str | None) -> int:
    try:
        return sum(file.size_bytes for file in Manifest.model_validate_json(manifest).files) if manifest else 0
    except ValidationError:  # of another version
        return 0


@dataclass(frozen=True, slots=True)
class Spent:
    """What a point that is done took."""

    point: str
    run: str
    ended_at: float
    timings: Mapping[str, float | None]


class Meters:
    """Reads of what is counted."""

    def __init__(self, database: Database) -> None:
        self._db = database

    @property
    def now(self) -> float:
        """By the ledger's clock."""
        return self._db.clock()

    def collected(self) -> dict[str, int]:
        """Snapshots and bytes that garbage collection has deleted."""
        found = self._db.read_meta(COLLECTED)
        return dict(json.loads(found[0])) if found else {"snapshots": 0, "bytes": 0}

    def oldest_queued_s(self) -> float:
        """How long the first in the queue has waited."""
        query = select(func.min(points.c.queued_at)).where(points.c.state == PointState.QUEUED)
        with self._db.reading() as connection:
            since = connection.execute(query).scalar()
        return max(self._db.clock() - since, 0.0) if since is not None else 0.0

    def open_drains(self) -> int:
        """Drains that wait."""
        query = select(func.count()).select_from(drains).where(drains.c.ended_at.is_(None))
        with self._db.reading() as connection:
            return int(connection.execute(query).scalar_one())

    def lags(self) -> dict[str, int]:
        """By run, how many steps the trainer was ahead when its last point ended."""
        last_first = (points.c.ended_at.desc(), points.c.seq.desc())
        place = func.row_number().over(partition_by=points.c.run, order_by=last_first).label("place")
        ended = (points.c.state == PointState.DONE) & points.c.lag_steps.is_not(None)
        ranked = select(points.c.run, points.c.lag_steps, place).where(ended).subquery()
        query = select(ranked.c.run, ranked.c.lag_steps).where(ranked.c.place == 1)
        with self._db.reading() as connection:
            return {run: int(lag) for run, lag in connection.execute(query)}

    def spent_since(self, ended_at: float) -> Iterator[Spent]:
        """What points took that were done since a time, and up to a minute before it."""
        columns = (points.c.id, points.c.run, points.c.ended_at, points.c.timings, points.c.lag_steps)
        query = select(*columns).where(points.c.state == PointState.DONE, points.c.ended_at >= ended_at - _SLACK_S)
        with self._db.reading() as connection:
            rows = connection.execute(query).all()
        for id_, run, at, timings, lag in rows:
            values: dict[str, Any] = json.loads(timings) | {"lag_steps": lag}
            yield Spent(id_, run, at, values)
