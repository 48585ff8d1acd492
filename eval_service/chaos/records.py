"""The ledger as chaos reads it: straight from the file, never written, so that it tells while no gateway lives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, RowMapping, create_engine, select
from sqlalchemy.exc import DBAPIError

from eval_service.chaos.idleness import Moment
from eval_service.contract.states import ENDS, PointState
from eval_service.contract.wire import EngineState, FleetView
from eval_service.ledger.database import CONTROLLER_AT, EPOCH, FLEET
from eval_service.ledger.schema import attempts, meta, points, runs, snapshots
from eval_service.ledger.turn import LIVE_STATES

_ENDS = tuple(state.value for state in ENDS)


@dataclass(frozen=True, slots=True)
class Acting:
    """Who acts: the epoch that was taken last, and the one that showed itself last, at Unix seconds."""

    epoch: int
    shown: int
    shown_at: float


@dataclass(frozen=True, slots=True)
class Everything:
    """All rows that promises are checked against."""

    points: tuple[dict[str, Any], ...]
    attempts: tuple[dict[str, Any], ...]
    snapshots: tuple[dict[str, Any], ...]


class Records:
    """A reader of the ledger; what can't be read now is None."""

    def __init__(self, ledger: Path) -> None:
        self._engine: Engine = create_engine(
            f"sqlite:///file:{ledger}?mode=ro&uri=true", connect_args={"timeout": 5.0, "check_same_thread": False}
        )

    def acting(self) -> Acting | None:
        """Who acts now."""
        found = {row["key"]: row for row in self._rows(select(meta))}
        if EPOCH not in found or CONTROLLER_AT not in found:
            return None
        shown = found[CONTROLLER_AT]
        return Acting(int(found[EPOCH]["value"]), int(shown["value"]), shown["at"])

    def moment(self) -> Moment | None:
        """What engines and points do, as `GET /fleet` and `GET /points` tell it."""
        found = {row["key"]: row for row in self._rows(select(meta))}
        if FLEET not in found:
            return None
        fleet = FleetView.model_validate_json(found[FLEET]["value"])
        engines = [engine for group in fleet.groups if group.kind != "frozen" for engine in group.engines]
        free = [one for one in engines if one.state is EngineState.READY and one.point is None]
        query = select(points.c.id, points.c.attempts, points.c.state, snapshots.c.admitted_at)
        query = query.join(snapshots, snapshots.c.id == points.c.snapshot_id).join(runs, runs.c.run == points.c.run)
        query = query.where(points.c.state.in_((PointState.QUEUED.value, *LIVE_STATES)), runs.c.paused.is_(False))
        rows = self._rows(query)
        queued = [row for row in rows if row["state"] == PointState.QUEUED and row["admitted_at"] is not None]
        return Moment(
            at=time.time(),
            epoch=int(found[CONTROLLER_AT]["value"]),
            shown_at=found[FLEET]["at"],
            free=frozenset(f"{one.id} {one.nonce}" for one in free),
            leased=frozenset(one.point for one in engines if one.point is not None),
            queued=frozenset((row["id"], row["attempts"]) for row in queued),
            under_way=frozenset(
                (row["id"], row["attempts"], row["state"]) for row in rows if row["state"] in LIVE_STATES
            ),
        )

    def open_attempts(self) -> frozenset[tuple[str, int]] | None:
        """Attempts that have not ended, each as point and number."""
        try:
            rows = self._read(select(attempts.c.point, attempts.c.number).where(attempts.c.ended_at.is_(None)))
        except DBAPIError:
            return None
        return frozenset((row["point"], row["number"]) for row in rows)

    def in_use(self) -> dict[str, str]:
        """The directories of snapshots that an open point needs, with the point."""
        query = select(points.c.id, snapshots.c.path).join(snapshots, snapshots.c.id == points.c.snapshot_id)
        rows = self._rows(query.where(points.c.state.not_in((*_ENDS, PointState.RESERVED.value))))
        return {row["path"]: row["id"] for row in rows}

    def open_points(self) -> list[dict[str, Any]]:
        """Points that have not ended."""
        return [dict(row) for row in self._rows(select(points).where(points.c.state.not_in(_ENDS)))]

    def newest_done(self) -> str | None:
        """The point that was done last of those whose snapshot is there."""
        query = select(points.c.id).join(snapshots, snapshots.c.id == points.c.snapshot_id)
        query = query.where(points.c.state == PointState.DONE.value, snapshots.c.deleted_at.is_(None))
        rows = self._rows(query.order_by(points.c.ended_at.desc()).limit(1))
        return str(rows[0]["id"]) if rows else None

    def everything(self) -> Everything:
        """All of it."""
        return Everything(
            *(tuple(dict(row) for row in self._rows(select(table))) for table in (points, attempts, snapshots))
        )

    def _rows(self, query: Any) -> Sequence[RowMapping]:
        try:
            return self._read(query)
        except DBAPIError:
            return []

    def _read(self, query: Any) -> Sequence[RowMapping]:
        with self._engine.connect() as connection:
            return connection.execute(query).mappings().all()

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()
