"""What a gateway may ask of the controller for one point, and when that may still be done.

The gateway refuses early and says why; the controller judges again when it carries the command out, by the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, insert, select

from eval_service.contract.states import ENDS, PointState
from eval_service.ledger.schema import commands, points, runs, snapshots


class Command(StrEnum):
    """Kinds of commands; each names a point."""

    GIVE_WAY = "give_way"  # overflow `latest`: a later point takes its place in the bound
    EXPORT_FAILED = "export_failed"
    CANCEL = "cancel"
    RETRY = "retry"


def give(connection: Connection, kind: Command, point: str, detail: str | None, now: float) -> int:
    """Write a command; returns its number."""
    row = insert(commands).values(kind=kind, target=point, detail=detail, created_at=now).returning(commands.c.seq)
    return int(connection.execute(row).scalar_one())


def open_commands(connection: Connection) -> Sequence[RowMapping]:
    """What has not been carried out, in the order it was asked for."""
    query = select(commands).where(commands.c.done_at.is_(None)).order_by(commands.c.seq)
    return connection.execute(query).mappings().all()


def with_snapshot() -> Select[Any]:
    """Points with what their commands are judged by."""
    columns = (snapshots.c.path, snapshots.c.held, snapshots.c.deleting_at, snapshots.c.deleted_at)
    query = select(points, *columns, runs.c.deleted_at.label("run_deleted_at"))
    return query.join(runs, runs.c.run == points.c.run).outerjoin(snapshots, snapshots.c.id == points.c.snapshot_id)


def objection(kind: Command, row: Mapping[Any, Any]) -> tuple[str, str | None] | None:
    """Why a command can't be carried out on a point, with a hint; None: it can."""
    return _OBJECTIONS[kind](row)


def _to_giving_way(row: Mapping[Any, Any]) -> tuple[str, str | None] | None:
    return None if row["state"] == PointState.QUEUED else (f"the point is {row['state']}", None)


def _to_report(row: Mapping[Any, Any]) -> tuple[str, str | None] | None:
    if row["state"] == PointState.RESERVED and row["snapshot_id"] is None:
        return None
    what = "its snapshot came" if row["state"] == PointState.RESERVED else f"the point is {row['state']}"
    return what, "only a reserved point can be reported"


def _to_cancel(row: Mapping[Any, Any]) -> tuple[str, str | None] | None:
    return (f"the point has ended: it is {row['state']}", None) if row["state"] in ENDS else None


def _to_retry(row: Mapping[Any, Any]) -> tuple[str, str | None] | None:
    if row["run_deleted_at"] is not None:
        return "its run is being deleted", None
    if row["state"] not in ENDS:
        return f"the point is {row['state']}", "only a point that has ended can be retried"
    if row["state"] == PointState.DONE:
        return "the point is done", "to evaluate it again, dispatch its snapshot under another reservation"
    if row["superseded"]:
        return "a newer point of this step and suite counts", "retry that one"
    return _snapshot_is_gone(row)


def _snapshot_is_gone(row: Mapping[Any, Any]) -> tuple[str, str | None] | None:
    if row["snapshot_id"] is None:
        return "no snapshot of it ever came", "export the step again and dispatch it"
    if row["deleting_at"] is not None or row["deleted_at"] is not None:
        return f"its snapshot {row['path']} was deleted", "export the step again and dispatch it"
    return None


_OBJECTIONS = {
    Command.GIVE_WAY: _to_giving_way,
    Command.EXPORT_FAILED: _to_report,
    Command.CANCEL: _to_cancel,
    Command.RETRY: _to_retry,
}
