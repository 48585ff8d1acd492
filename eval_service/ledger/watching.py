"""Keeping the alarms of points: those that compare a point with the one before it, by step, are made where a point is
recorded, for it and for the one after it, since points may come in any order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from pydantic import TypeAdapter
from sqlalchemy import Connection, RowMapping, select, update

from eval_service.contract.results import Alarm, Direction, Metric
from eval_service.contract.states import PointState
from eval_service.ledger.events import point_alarmed
from eval_service.ledger.schema import points
from eval_service.suites.alarms import COMPARING, Told, alarms_against

_ALARMS = TypeAdapter(tuple[Alarm, ...])


def to_text(alarms: Iterable[Alarm]) -> str:
    """As the ledger keeps them."""
    return _ALARMS.dump_json(tuple(alarms)).decode()


def from_text(text: str | None) -> tuple[Alarm, ...]:
    """As the ledger kept them; none where an older version looked for none."""
    return _ALARMS.validate_json(text) if text else ()


def look_around(connection: Connection, row: RowMapping, now: float) -> None:
    """Compare a point that is done now with the one before it, and the one after it with this; tell of new alarms."""
    same = (points.c.run == row["run"]) & (points.c.suite == row["suite"]) & points.c.superseded.is_(False)
    query = select(points).where(same, points.c.state == PointState.DONE)
    earlier = query.where(points.c.step < row["step"]).order_by(points.c.step.desc(), points.c.seq.desc())
    later = query.where(points.c.step > row["step"]).order_by(points.c.step, points.c.seq.desc())
    before = connection.execute(earlier.limit(1)).mappings().first()
    after = connection.execute(later.limit(1)).mappings().first()
    _tell(connection, row, (), _compare(connection, before, row), now)
    if after is not None:
        _tell(connection, after, from_text(after["alarms"]), _compare(connection, row, after), now)


def _compare(connection: Connection, before: RowMapping | None, row: RowMapping) -> tuple[Alarm, ...]:
    held = from_text(row["alarms"])
    now = _told(row)
    if now is None:
        return held
    own = tuple(alarm for alarm in held if alarm.kind not in COMPARING)
    alarms = own + alarms_against(_told(before) if before is not None else None, now)
    if alarms != held:
        connection.execute(update(points).where(points.c.id == row["id"]).values(alarms=to_text(alarms)))
    return alarms


def _tell(connection: Connection, row: RowMapping, known: Iterable[Alarm], alarms: Iterable[Alarm], now: float) -> None:
    new = {alarm.kind for alarm in alarms} - {alarm.kind for alarm in known}
    if new:
        point_alarmed(connection, row, sorted(new), now)


def _told(row: RowMapping) -> Told | None:
    """None of a point that an older version recorded: it did not say what it was asked."""
    if row["headline"] is None or row["suite_digest"] is None:
        return None
    metrics = {name: Metric.model_validate(value) for name, value in json.loads(row["metrics"]).items()}
    direction = Direction(row["direction"] or Direction.MAX)
    return Told(row["id"], row["step"], row["headline"], direction, row["suite_digest"], metrics)
