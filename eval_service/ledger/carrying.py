"""How the acting controller carries out what gateways wrote: arrivals, commands, deadlines, the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, select, update

from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import OnTimeout
from eval_service.ledger.commands import Command, objection, open_commands, with_snapshot
from eval_service.ledger.rows import carry_out
from eval_service.ledger.schema import commands, drains, points, runs, snapshots
from eval_service.ledger.turn import END_STATES, Turn

_ENDED_BY: dict[Command, tuple[PointState, Reason]] = {
    Command.GIVE_WAY: (PointState.SKIPPED, Reason.BUSY),
    Command.EXPORT_FAILED: (PointState.SKIPPED, Reason.EXPORT_FAILED),
    Command.EXPORTER_BUSY: (PointState.SKIPPED, Reason.BUSY),
    Command.CANCEL: (PointState.CANCELLED, Reason.USER),
}


def is_asked(connection: Connection, now: float, reservation_timeout_s: float) -> bool:
    """Whether there is anything to carry out; a look that needs no write lock."""
    queries = (_arrivals(), _open_of_deleted_runs(), _unused(now - reservation_timeout_s))
    return bool(open_commands(connection)) or any(connection.execute(query.limit(1)).first() for query in queries)


def take_arrivals(turn: Turn) -> int:
    """Queue points whose snapshot came, late ones too: their export was paid for."""

    def arrive(row: RowMapping) -> None:
        turn.move(row["id"], PointState.QUEUED, queued_at=turn.now, detail=None)
        if row["admitted_at"] is not None and not turn.overtaken(row["id"], row["snapshot_id"]):
            turn.supersede(row["id"], row["digest"])

    return carry_out(turn.connection, turn.connection.execute(_arrivals()).mappings().all(), arrive)


def take_commands(turn: Turn) -> int:
    """Carry out what can still be done; what can't is dropped, for whoever asked can see the point's state."""

    def obey(row: RowMapping) -> None:
        point = turn.connection.execute(with_snapshot().where(points.c.id == row["target"])).mappings().one_or_none()
        if point is not None and objection(Command(row["kind"]), point) is None:
            _carry_out(turn, Command(row["kind"]), row)

    rows = open_commands(turn.connection)
    carry_out(turn.connection, rows, obey)
    taken = [row["seq"] for row in rows]
    turn.connection.execute(update(commands).where(commands.c.seq.in_(taken)).values(done_at=turn.now))
    return len(rows)


def expire_reservations(turn: Turn, timeout_s: float) -> int:
    """Skip reservations that nobody used."""
    return _end_all(
        turn,
        _unused(turn.now - timeout_s),
        PointState.SKIPPED,
        Reason.RESERVATION_EXPIRED,
        f"no snapshot came within {timeout_s:.0f} s",
    )


def end_deleted_runs(turn: Turn) -> int:
    """Cancel what is open of runs that somebody deletes."""
    return _end_all(turn, _open_of_deleted_runs(), PointState.CANCELLED, Reason.RUN_DELETED, "")


def overdue_drains(connection: Connection, now: float) -> Sequence[RowMapping]:
    """Drains whose time is up, that asked for an abort by then and had none yet."""
    # One that was drained in time is over; what a gateway closed unaborted, with no controller there, is not.
    unended = drains.c.ended_at.is_(None) | (drains.c.ended_at >= drains.c.deadline)
    overdue = select(drains).where(drains.c.deadline <= now, drains.c.on_timeout == OnTimeout.ABORT, unended)
    return connection.execute(overdue.where(drains.c.aborted_at.is_(None))).mappings().all()


def abort_overdue_drains(turn: Turn) -> int:
    """Cancel what is left of runs whose drain asked for that at its deadline; returns how many drains."""
    rows = overdue_drains(turn.connection, turn.now)
    for drain in rows:
        # A dispatch after the deadline reopened the run: it is none of this drain's.
        of_it = (points.c.run == drain["run"]) & (points.c.created_at <= drain["deadline"])
        why = f"drain {drain['id']}"
        _end_all(turn, _open_points(of_it), PointState.CANCELLED, Reason.DRAIN_TIMEOUT, why)
        turn.connection.execute(update(drains).where(drains.c.id == drain["id"]).values(aborted_at=turn.now))
    return len(rows)


def _carry_out(turn: Turn, kind: Command, row: RowMapping) -> None:
    if kind is Command.RETRY:
        # Its deadline and its faults count anew: what spoiled it may have been mended since.
        turn.move(row["target"], PointState.QUEUED, queued_at=turn.now, faults=0, detail=None)
    else:
        state, reason = _ENDED_BY[kind]
        turn.end(row["target"], state, reason, row["detail"] or "")


def _arrivals() -> Select[Any]:
    late = (points.c.state == PointState.SKIPPED) & (points.c.reason == Reason.RESERVATION_EXPIRED)
    return (
        select(points.c.id, points.c.snapshot_id, snapshots.c.digest, snapshots.c.admitted_at)
        .join(snapshots, snapshots.c.id == points.c.snapshot_id)
        .where((points.c.state == PointState.RESERVED) | late)
        .order_by(points.c.seq)
    )


def _unused(since: float) -> Select[Any]:
    unused = (points.c.state == PointState.RESERVED) & points.c.snapshot_id.is_(None)
    return select(points.c.id).where(unused, points.c.created_at < since)


def _open_points(condition: Any) -> Select[Any]:
    return select(points.c.id).where(condition, points.c.state.not_in(END_STATES))


def _open_of_deleted_runs() -> Select[Any]:
    return _open_points(points.c.run.in_(select(runs.c.run).where(runs.c.deleted_at.is_not(None))))


def _end_all(turn: Turn, query: Select[Any], state: PointState, reason: Reason, detail: str) -> int:
    found = turn.connection.execute(query.order_by(points.c.seq)).scalars().all()
    return carry_out(turn.connection, found, lambda point: turn.end(point, state, reason, detail))
