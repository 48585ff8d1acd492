"""One write transaction of the acting controller: the only code that changes a point's state.

Invariants: every move is by the table and reads the point's row as it is then, so that no caller can act on a stale
one; a snapshot settles with the end of its last point, and is unsettled when one of them is queued again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, select, update

from eval_service.contract.states import ENDS, LIVE, PointState, Reason, check_transition
from eval_service.ledger.database import Database
from eval_service.ledger.events import point_moved
from eval_service.ledger.schema import attempts, points, runs, snapshots

END_STATES = tuple(state.value for state in ENDS)
OPEN_STATES = tuple(state.value for state in PointState if state not in ENDS)
LIVE_STATES = tuple(state.value for state in LIVE)
_MAX_DETAIL = 4000


@contextmanager
def turn(database: Database, epoch: int) -> Iterator[Turn]:
    """Act under an epoch.

    Raises:
        Fenced: the epoch has moved on.
    """
    with database.acting(epoch) as connection:
        yield Turn(connection, database.clock())


@dataclass(frozen=True, slots=True)
class Turn:
    """What may be done within the transaction."""

    connection: Connection
    now: float

    def point(self, point: str) -> RowMapping:
        """A point as it is now."""
        return self.connection.execute(select(points).where(points.c.id == point)).mappings().one()

    def points_on(self, snapshot: str, state: PointState) -> Sequence[RowMapping]:
        """A snapshot's points in a state, in the order they were asked for."""
        query = select(points).where(points.c.snapshot_id == snapshot, points.c.state == state)
        return self.connection.execute(query.order_by(points.c.seq)).mappings().all()

    def move(self, point: str, new: PointState, **values: Any) -> None:
        """Move a point by the table, with what else is known of it by then."""
        row = self.point(point)
        check_transition(PointState(row["state"]), new, values.get("reason"))
        if new in ENDS:
            step = select(runs.c.step).where(runs.c.run == row["run"]).scalar_subquery()
            values |= {"ended_at": self.now, "lag_steps": step - row["step"]}
        else:
            values = {"reason": None, "ended_at": None, "lag_steps": None, **values}
        self.connection.execute(update(points).where(points.c.id == point).values(state=new, **values))
        point_moved(self.connection, row, new, values.get("reason"), self.now)
        if row["snapshot_id"] is not None:
            settle(self.connection, row["snapshot_id"], self.now)

    def end(self, point: str, state: PointState, reason: Reason, detail: str, **values: Any) -> None:
        """End a point without a result, and its attempt with it."""
        if self.point(point)["state"] in LIVE_STATES:
            self.end_attempt(point, str(reason), detail)
        self.move(point, state, reason=reason, detail=detail[:_MAX_DETAIL], **values)

    def end_attempt(self, point: str, outcome: str, detail: str | None, engines: Iterable[str] = ()) -> None:
        """Write how the attempt under way came out."""
        number = select(points.c.attempts).where(points.c.id == point).scalar_subquery()
        self.connection.execute(
            update(attempts)
            .where(attempts.c.point == point, attempts.c.number == number, attempts.c.ended_at.is_(None))
            .values(ended_at=self.now, outcome=outcome, detail=detail, engines=json.dumps(list(engines)))
        )

    def supersede(self, point: str, digest: str) -> None:
        """The newest of a (run, step, suite) counts; the same content that is still on its way counts as it is."""
        row = self.point(point)
        query = (
            select(points.c.id, points.c.state, snapshots.c.digest, snapshots.c.claimed_digest)
            .join(snapshots, snapshots.c.id == points.c.snapshot_id)
            .where(points.c.run == row["run"], points.c.step == row["step"], points.c.suite == row["suite"])
            .where(points.c.seq < row["seq"], points.c.superseded.is_(False))
        )
        for older in self.connection.execute(query.order_by(points.c.seq)).mappings().all():
            if older["state"] in END_STATES:
                self.connection.execute(update(points).where(points.c.id == older["id"]).values(superseded=True))
            elif (older["digest"] or older["claimed_digest"]) == digest:
                self._give_up(point, f"the same snapshot is point {older['id']}")
                return
            else:
                self._give_up(older["id"], f"by point {point}")

    def _give_up(self, point: str, detail: str) -> None:
        self.end(point, PointState.CANCELLED, Reason.SUPERSEDED, detail, superseded=True)


def settle(connection: Connection, snapshot: str, now: float) -> None:
    """A snapshot has settled when none of its points is open, and only then."""
    is_open = points.c.state.not_in(END_STATES)
    left = connection.execute(select(points.c.id).where(points.c.snapshot_id == snapshot, is_open).limit(1)).first()
    settled = snapshots.c.settled_at.is_not(None)
    of_it = update(snapshots).where(snapshots.c.id == snapshot)
    if left is None:
        connection.execute(of_it.where(~settled).values(settled_at=now))
    else:
        connection.execute(of_it.where(settled).values(settled_at=None))
