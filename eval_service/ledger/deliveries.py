"""How far trackers, webhooks and traces have been told: a cursor over the events for each, and what is late.

Invariants: a cursor passes an event only within the transaction that notes it as delivered, of no concern, or late, so
nothing is left out, whatever dies; a delivery may be repeated. What is late is kept until it is delivered, also when
the events are pruned; where events were pruned before one came to them, the ends of points are taken from the points.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from eval_service.contract.states import ENDS
from eval_service.ledger.database import Database
from eval_service.ledger.events import Event, EventKind, EventLog
from eval_service.ledger.schema import deliveries, events, late_deliveries, points

MOST_LATE = 500  # that are tried again at once
MOST_BACKOFF_S = 300.0
_SLACK_S = 60.0
_MAX_ERROR = 500


@dataclass(frozen=True, slots=True)
class Failed:
    """An event that could not be told."""

    event: Event
    error: str
    tried: bool = True  # False: its run waits for another try


@dataclass(frozen=True, slots=True)
class Told:
    """What became of one look at the events."""

    position: int
    delivered: Sequence[int] = ()
    failed: Sequence[Failed] = ()
    refused: int = 0


@dataclass(frozen=True, slots=True)
class DeliveryState:
    """How one of them stands. `waiting` counts what is late, `behind` events that were not looked at yet."""

    name: str
    delivered: int
    refused: int
    failures: int
    waiting: int
    behind: int
    oldest_at: float | None
    error: str | None


class Deliveries:
    """The ledger's side of them."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._log = EventLog(database)

    @property
    def database(self) -> Database:
        """Whose they are."""
        return self._db

    def begin(self, name: str, *, from_start: bool) -> int:
        """Where one goes on, noting what was pruned meanwhile; a new one begins with the first event or the next."""
        oldest, newest = self._log.ends()
        with self._db.writing() as connection:
            row = connection.execute(select(deliveries).where(deliveries.c.name == name)).mappings().one_or_none()
            if row is None:
                at, seq = (0.0, 0) if from_start else (self._db.clock(), newest)
                values = {"seq": seq, "at": at, "delivered": 0, "refused": 0, "failures": 0}
                connection.execute(insert(deliveries).values(name=name, **values))
            else:
                at, seq = row["at"], row["seq"]
            if seq < oldest - 1 or seq > newest:
                self._note_ends(connection, name, at - _SLACK_S)
                seq = newest if seq > newest else oldest - 1
                connection.execute(update(deliveries).where(deliveries.c.name == name).values(seq=seq))
        return seq

    def keep_only(self, names: Collection[str]) -> None:
        """Forget those that are not configured any more."""
        with self._db.reading() as connection:
            gone = set(connection.execute(select(deliveries.c.name)).scalars()) - set(names)
        if gone:
            with self._db.writing() as connection:
                connection.execute(delete(late_deliveries).where(late_deliveries.c.name.in_(gone)))
                connection.execute(delete(deliveries).where(deliveries.c.name.in_(gone)))

    def after(self, seq: int) -> list[Event]:
        """The next events."""
        return self._log.after(seq)

    def due(self, name: str) -> list[Event]:
        """What is late and may be tried again."""
        late = late_deliveries
        query = select(late).where(late.c.name == name, late.c.next_at <= self._db.clock()).order_by(late.c.seq)
        with self._db.reading() as connection:
            rows = connection.execute(query.limit(MOST_LATE)).mappings().all()
        return [Event(row["seq"], row["kind"], row["run"], row["data"]) for row in rows]

    def backing_off(self, name: str) -> frozenset[str]:
        """Runs that wait for another try."""
        late = late_deliveries
        query = select(late.c.run).where(late.c.name == name, late.c.next_at > self._db.clock()).distinct()
        with self._db.reading() as connection:
            return frozenset(connection.execute(query).scalars())

    def note(self, name: str, told: Told) -> None:
        """Write what became of a look."""
        mine, late = deliveries.c.name == name, late_deliveries
        with self._db.writing() as connection:
            for chunk in _chunks(told.delivered):
                connection.execute(delete(late).where(late.c.name == name, late.c.seq.in_(chunk)))
            for failed in told.failed:
                self._note_late(connection, name, failed)
            tried = [failed.error for failed in told.failed if failed.tried]
            values: dict[str, Any] = {
                "delivered": deliveries.c.delivered + len(told.delivered),
                "refused": deliveries.c.refused + told.refused,
                "failures": deliveries.c.failures + len(tried),
            }
            if tried or told.delivered:
                values["error"] = tried[-1][:_MAX_ERROR] if tried else None
            connection.execute(update(deliveries).where(mine).values(**values))
            further = mine & (deliveries.c.seq < told.position)
            connection.execute(update(deliveries).where(further).values(seq=told.position, at=self._db.clock()))

    def states(self) -> list[DeliveryState]:
        """How each of them stands."""
        late = late_deliveries
        with self._db.reading() as connection:
            newest = connection.execute(select(func.coalesce(func.max(events.c.seq), 0))).scalar_one()
            query = select(late.c.name, func.count(), func.min(late.c.at)).group_by(late.c.name)
            waiting = {name: (count, oldest) for name, count, oldest in connection.execute(query)}
            rows = connection.execute(select(deliveries).order_by(deliveries.c.name)).mappings().all()
        return [
            DeliveryState(
                name=row["name"],
                delivered=row["delivered"],
                refused=row["refused"],
                failures=row["failures"],
                waiting=waiting.get(row["name"], (0, None))[0],
                behind=max(newest - row["seq"], 0),
                oldest_at=waiting.get(row["name"], (0, None))[1],
                error=row["error"],
            )
            for row in rows
        ]

    # --- how

    def _note_late(self, connection: Connection, name: str, failed: Failed) -> None:
        late, event, now = late_deliveries, failed.event, self._db.clock()
        same = (late.c.name == name) & (late.c.seq == event.seq)
        tries = connection.execute(select(late.c.tries).where(same)).scalar_one_or_none()
        count = (tries or 0) + (1 if failed.tried else 0)
        next_at = now + min(MOST_BACKOFF_S, 2.0 ** min(count, 16))
        if not failed.tried:  # it goes with the others of its run
            others = (late.c.name == name) & (late.c.run == (event.run or ""))
            next_at = connection.execute(select(func.max(late.c.next_at)).where(others)).scalar() or now
        values = {"tries": count, "next_at": next_at}
        if tries is None:
            fixed = {"run": event.run or "", "kind": event.kind, "data": event.data, "at": now}
            connection.execute(insert(late).values(name=name, seq=event.seq, **fixed, **values))
        else:
            connection.execute(update(late).where(same).values(**values))

    def _note_ends(self, connection: Connection, name: str, since: float) -> None:
        """The events are gone; what they told of points is still there. Numbers below 0 are of no event."""
        columns = (points.c.id, points.c.seq, points.c.run, points.c.step, points.c.suite, points.c.state)
        ended = points.c.state.in_([state.value for state in ENDS]) & (points.c.ended_at >= since)
        query = select(*columns, points.c.reason, points.c.ended_at).where(ended).order_by(points.c.ended_at)
        known = set(connection.execute(select(late_deliveries.c.seq).where(late_deliveries.c.name == name)).scalars())
        rows = connection.execute(query).mappings().all()
        late = [
            {"name": name, "seq": -row["seq"], "run": row["run"], "kind": EventKind.POINT.value, "at": row["ended_at"]}
            | {"tries": 0, "next_at": 0.0, "data": json.dumps(_as_told(dict(row)))}
            for row in rows
            if -row["seq"] not in known
        ]
        if late:
            connection.execute(insert(late_deliveries), late)


def _as_told(row: dict[str, object]) -> dict[str, object]:
    told = {name: row[name] for name in ("run", "step", "suite", "state", "reason")}
    return told | {"point": row["id"], "at": row["ended_at"]}


def _chunks(numbers: Sequence[int], size: int = 500) -> Iterable[Sequence[int]]:
    return (numbers[start : start + size] for start in range(0, len(numbers), size))
