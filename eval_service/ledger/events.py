"""What became of points, drains and engines, numbered in the order in which it was committed.

Whoever moves something writes the event within the same transaction, so that there is none for what did not happen and
none is missing. The newest `KEPT` are there; who asks for what comes after an older one is told that some are gone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, RowMapping, bindparam, delete, func, insert, select

from eval_service.contract.wire import FleetView
from eval_service.ledger.database import Database
from eval_service.ledger.schema import events

KEPT = 50_000
_PAGE = 500
_INSERT = insert(events)
_AFTER = select(events).where(events.c.seq > bindparam("after")).order_by(events.c.seq).limit(_PAGE)
_ENDS = select(func.coalesce(func.min(events.c.seq), 0), func.coalesce(func.max(events.c.seq), 0))


class EventKind(StrEnum):
    """What an event is about."""

    POINT = "point"
    DRAIN = "drain"
    FLEET = "fleet"
    ALARM = "alarm"


@dataclass(frozen=True, slots=True)
class Event:
    """One of them; `data` is JSON."""

    seq: int
    kind: str
    run: str | None
    data: str


def point_moved(connection: Connection, row: Mapping[Any, Any], state: str, reason: str | None, now: float) -> None:
    """A point is in another state, or is new."""
    points_moved(connection, [row], state, reason, now)


def points_moved(
    connection: Connection, rows: Sequence[Mapping[Any, Any]], state: str, reason: str | None, now: float
) -> None:
    """Points are in another state, or are new."""
    told = [{name: row[name] for name in ("run", "step", "suite")} | {"point": row["id"]} for row in rows]
    _note(connection, EventKind.POINT, [one | {"state": state, "reason": reason} for one in told], now)


def point_alarmed(connection: Connection, row: Mapping[Any, Any], alarms: Sequence[str], now: float) -> None:
    """Something may be wrong with a run, as seen at a point."""
    told = {name: row[name] for name in ("run", "step", "suite")} | {"point": row["id"], "alarms": list(alarms)}
    _note(connection, EventKind.ALARM, [told], now)


def drain_moved(connection: Connection, drain: str, run: str, now: float, *, drained: bool | None = None) -> None:
    """A drain began, or (with `drained`) ended."""
    state = "begun" if drained is None else "ended"
    _note(connection, EventKind.DRAIN, [{"run": run, "drain": drain, "state": state, "drained": drained}], now)


def fleet_changed(connection: Connection, before: FleetView, after: FleetView, now: float) -> None:
    """Tell which engines came, went, or are in another state."""
    was, are = _engines(before), _engines(after)
    told = [
        {
            "run": None,
            "group": group,
            "engine": engine,
            "state": are.get((group, engine)),
            "was": was.get((group, engine)),
        }
        for group, engine in sorted(was.keys() | are.keys())
        if was.get((group, engine)) != are.get((group, engine))
    ]
    _note(connection, EventKind.FLEET, told, now)


def prune(connection: Connection) -> None:
    """Forget all but the newest."""
    newest = select(func.max(events.c.seq)).scalar_subquery()
    connection.execute(delete(events).where(events.c.seq <= newest - KEPT))


class EventLog:
    """Reads of them."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def ends(self) -> tuple[int, int]:
        """The oldest that is kept and the newest; 0 where there is none."""
        with self._db.reading() as connection:
            oldest, newest = connection.execute(_ENDS).one()
        return int(oldest), int(newest)

    def after(self, seq: int) -> list[Event]:
        """The next ones after a number; at most a page of them."""
        with self._db.reading() as connection:
            return [_event(row) for row in connection.execute(_AFTER, {"after": seq}).mappings()]


def _event(row: RowMapping) -> Event:
    return Event(row["seq"], row["kind"], row["run"], row["data"])


def _note(connection: Connection, kind: EventKind, told: Sequence[Mapping[str, Any]], now: float) -> None:
    rows = [
        {"kind": kind.value, "run": one["run"], "data": json.dumps(one | {"at": now}), "at": now}  # type: ignore[operator]
        for one in told
    ]
    if rows:
        connection.execute(_INSERT, rows)


def _engines(view: FleetView) -> dict[tuple[str, str], str]:
    return {(group.name, engine.id): engine.state for group in view.groups for engine in group.engines}
