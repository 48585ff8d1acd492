"""A run's curve, and the drains, as the dashboard shows them; few columns and no more rows than are asked for."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import RowMapping, func, select

from eval_service.contract.curves import Curve, CurvePoint, DrainPage, DrainView, Span
from eval_service.contract.errors import NotFound
from eval_service.contract.results import Direction
from eval_service.contract.states import PointState
from eval_service.ledger.database import Database
from eval_service.ledger.schema import drains, points, runs
from eval_service.ledger.watching import from_text

_COLUMNS = ("id", "step", "state", "reason", "lag_steps", "alarms", "score", "headline", "direction", "metrics")


@dataclass(frozen=True, slots=True)
class Measured:
    """A point of a curve that has samples, and where they lie."""

    id: str
    step: int
    suite_digest: str | None
    samples_path: str


class Curves:
    """Reads of the ledger for charts."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def curve(self, run: str, suite: str | None, metrics: Collection[str]) -> Curve:
        """The points that count of a run's suite (None: its first), with these metrics (none: the headline).

        Raises:
            NotFound: no such run.
        """
        of_run = points.c.run == run
        with self._db.reading() as connection:
            spec = connection.execute(select(runs.c.spec).where(runs.c.run == run)).scalar_one_or_none()
            if spec is None:
                raise NotFound(f"no run {run!r}", field="run")
            asked = tuple(json.loads(spec)["suites"])
            there = connection.execute(select(points.c.suite).where(of_run).distinct()).scalars().all()
            suites = (*asked, *sorted(set(there) - set(asked)))
            chosen = suite if suite is not None else suites[0]
            query = select(*(points.c[name] for name in _COLUMNS)).order_by(points.c.step, points.c.seq)
            counting = (of_run, points.c.suite == chosen, points.c.superseded.is_(False))
            rows = connection.execute(query.where(*counting)).mappings().all()
        return _curve(run, chosen, suites, metrics, rows)

    def measured(self, run: str, suite: str) -> list[Measured]:
        """The points of a curve that have samples, by step."""
        counting = (points.c.run == run, points.c.suite == suite, points.c.superseded.is_(False))
        there = (points.c.state == PointState.DONE, points.c.samples_path.is_not(None))
        columns = (points.c[name] for name in ("id", "step", "suite_digest", "samples_path"))
        query = select(*columns).where(*counting, *there).order_by(points.c.step, points.c.seq)
        with self._db.reading() as connection:
            return [Measured(*row) for row in connection.execute(query)]

    def drains(self, run: str | None, *, offset: int, limit: int) -> DrainPage:
        """The drains of a run, or of all, the newest first."""
        conditions = [] if run is None else [drains.c.run == run]
        columns = (
            drains.c.id.label("drain"),
            *(drains.c[name] for name in ("run", "started_at", "deadline", "ended_at")),
        )
        query = select(*columns).where(*conditions).order_by(drains.c.started_at.desc(), drains.c.id)
        with self._db.reading() as connection:
            total = connection.execute(select(func.count()).select_from(drains).where(*conditions)).scalar_one()
            rows = connection.execute(query.offset(offset).limit(limit)).mappings().all()
        return DrainPage(drains=tuple(DrainView(**row) for row in rows), total=total)


def _curve(run: str, suite: str, suites: tuple[str, ...], asked: Collection[str], rows: Sequence[RowMapping]) -> Curve:
    newest = next((row for row in reversed(rows) if row["headline"] is not None), None)
    headline = newest["headline"] if newest else None
    direction = Direction(newest["direction"] or Direction.MAX) if newest else Direction.MAX
    metrics = [json.loads(row["metrics"]) for row in rows]
    wanted = tuple(asked) or ((headline,) if headline else ())
    return Curve(
        run=run,
        suite=suite,
        suites=suites,
        headline=headline,
        direction=direction,
        metrics=tuple(dict.fromkeys(name for of_one in metrics for name in of_one)),
        best=_best(rows, direction),
        points=tuple(_point(row, of_it, wanted) for row, of_it in zip(rows, metrics, strict=True)),
    )


def _point(row: RowMapping, metrics: dict[str, dict[str, Any]], wanted: Iterable[str]) -> CurvePoint:
    found = {name: metrics[name] for name in wanted if name in metrics}
    return CurvePoint(
        id=row["id"],
        step=row["step"],
        state=row["state"],
        reason=row["reason"],
        lag_steps=row["lag_steps"],
        alarms=tuple(alarm.kind for alarm in from_text(row["alarms"])),
        values={name: Span(value=of["value"], low=of.get("low"), high=of.get("high")) for name, of in found.items()},
    )


def _best(rows: Iterable[RowMapping], direction: Direction) -> str | None:
    """Of equals the newest, as garbage collection keeps it and the advice has it."""
    best: RowMapping | None = None
    for row in rows:
        counts = row["state"] == PointState.DONE and row["score"] is not None
        if counts and (best is None or not direction.better(best["score"], row["score"])):
            best = row
    return best["id"] if best is not None else None
