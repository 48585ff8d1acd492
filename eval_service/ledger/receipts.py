"""The receipt of a drain: which point counts for each step and suite, and what became of it.

Invariant: the first receipt that is written is the one that everybody gets; the controller writes it as soon as the
drain is over, and a gateway does where no controller is there to do so.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, select, update

from eval_service.contract.states import ENDS, PointState
from eval_service.contract.wire import EndedPoint, OnTimeout, Receipt
from eval_service.ledger.database import CONTROLLER_SILENT_S
from eval_service.ledger.events import drain_moved
from eval_service.ledger.schema import drains, points, runs

_NAMED = ("id", "seq", "step", "suite", "state", "reason", "detail", "superseded", "snapshot_id")
_COUNTED = select(*(points.c[name] for name in _NAMED)).order_by(points.c.seq)
_ENDS = tuple(state.value for state in ENDS)
_OPEN = tuple(state.value for state in PointState if state not in ENDS)


def over(connection: Connection, waiting: Sequence[RowMapping], now: float) -> list[RowMapping]:
    """Those of some drains that wait no longer; one query, however many there are."""
    pending = _pending(connection, {drain["run"] for drain in waiting if drain["receipt"] is None})
    return [drain for drain in waiting if drain["run"] not in pending or _is_over(drain, now)]


def receipt(connection: Connection, drain: RowMapping, now: float) -> Receipt:
    """A drain's receipt as it stands."""
    if drain["receipt"] is not None:
        return Receipt.model_validate_json(drain["receipt"])
    rows = connection.execute(_COUNTED.where(points.c.run == drain["run"])).mappings().all()
    return _receipt(drain, current(rows), now)


def to_end(connection: Connection, now: float) -> list[RowMapping]:
    """The drains that are over and have no receipt yet."""
    waiting = (
        connection.execute(select(drains).where(drains.c.ended_at.is_(None)).order_by(drains.c.started_at))
        .mappings()
        .all()
    )
    return over(connection, waiting, now)


def end_drains(connection: Connection, now: float) -> int:
    """Write the receipts of the drains that are over; returns how many."""
    found = to_end(connection, now)
    for drain in found:
        end_drain(connection, drain, now)
    return len(found)


def end_drain(connection: Connection, drain: RowMapping, now: float) -> None:
    """Keep a drain's receipt, if it is over; the first one counts."""
    found = receipt(connection, drain, now)
    if found.open:
        return
    mine = update(drains).where(drains.c.id == drain["id"], drains.c.ended_at.is_(None))
    ended = connection.execute(mine.values(ended_at=now, receipt=found.model_dump_json()))
    if not ended.rowcount:
        return
    drain_moved(connection, drain["id"], drain["run"], now, drained=found.drained)
    if found.drained:
        connection.execute(update(runs).where(runs.c.run == drain["run"]).values(state="drained"))


def current(rows: Sequence[RowMapping]) -> list[RowMapping]:
    """The point that counts for each (step, suite): the newest whose snapshot came, else the newest."""
    best: dict[tuple[int, str], RowMapping] = {}
    for row in rows:
        if row["superseded"]:
            continue
        key = (row["step"], row["suite"])
        held = best.get(key)
        if held is None or _rank(row) > _rank(held):
            best[key] = row
    return [best[key] for key in sorted(best)]


def _is_over(drain: RowMapping, now: float) -> bool:
    """Whether it ends although points are pending."""
    return drain["receipt"] is not None or (now >= drain["deadline"] and _abort_is_over(drain, now))


def _pending(connection: Connection, of_runs: Collection[str]) -> frozenset[str]:
    """Runs of which a point that counts has not ended; an open one that a newer took the place of does not count."""
    if not of_runs:
        return frozenset()
    newer = points.alias("newer")
    came = newer.c.snapshot_id.is_not(None) | newer.c.state.in_(_OPEN)
    same = (newer.c.run == points.c.run) & (newer.c.step == points.c.step) & (newer.c.suite == points.c.suite)
    outdone = select(newer.c.id).where(same, newer.c.seq > points.c.seq, newer.c.superseded.is_(False), came).exists()
    query = select(points.c.run).where(points.c.run.in_(of_runs), points.c.state.in_(_OPEN), ~outdone).distinct()
    return frozenset(connection.execute(query).scalars())


def _rank(row: RowMapping) -> tuple[bool, int]:
    lives_or_came = row["snapshot_id"] is not None or row["state"] not in _ENDS
    return (lives_or_came, row["seq"])


def _receipt(drain: RowMapping, rows: Sequence[RowMapping], now: float) -> Receipt:
    lists = _lists(drain, rows)
    drained = not lists["pending"]
    timed_out = not drained and now >= drain["deadline"] and _abort_is_over(drain, now)
    over = drained or timed_out
    return Receipt(
        drain=drain["id"],
        run=drain["run"],
        open=not over,
        drained=drained,
        timed_out=timed_out or drain["aborted_at"] is not None,
        started_at=drain["started_at"],
        ended_at=now if over else None,
        deadline=drain["deadline"],
        **{name: tuple(lines) for name, lines in lists.items()},
    )


def _lists(drain: RowMapping, rows: Sequence[RowMapping]) -> dict[str, Any]:
    lists: dict[str, list[EndedPoint]] = defaultdict(list)
    for row in rows:
        name = row["state"] if row["state"] in _ENDS else "pending"
        reason = row["reason"] if row["state"] in _ENDS else row["state"]
        line = EndedPoint(step=row["step"], suite=row["suite"], point=row["id"], reason=reason, detail=row["detail"])
        lists[name].append(line)
    came = {(row["step"], row["suite"]) for row in rows}
    for planned in json.loads(drain["planned"]):
        if (planned["step"], planned["suite"]) not in came:
            lists["never_came"].append(EndedPoint(step=planned["step"], suite=planned["suite"]))
    return lists


def _abort_is_over(drain: RowMapping, now: float) -> bool:
    """With `abort` the controller first cancels what is left; a dead one is not waited for beyond a few seconds."""
    if drain["on_timeout"] != OnTimeout.ABORT:
        return True
    return drain["aborted_at"] is not None or now > drain["deadline"] + 2 * CONTROLLER_SILENT_S
