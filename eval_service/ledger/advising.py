"""The best point of a run and suite, as the ledger has it: what garbage collection keeps, what a trainer may ask."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, RowMapping, case, func, select

from eval_service.contract.errors import InvalidRequest, NotFound
from eval_service.contract.results import Advice, Best, Direction, Metric
from eval_service.contract.states import PointState
from eval_service.contract.wire import RunSpec
from eval_service.ledger.database import Database
from eval_service.ledger.schema import points, runs, snapshots
from eval_service.suites.advice import Scored, judge


@dataclass(frozen=True, slots=True)
class Question:
    """What advice is asked for. None: the run's first suite; the suite's headline, and its direction."""

    suite: str | None = None
    metric: str | None = None
    direction: Direction | None = None
    patience: int = 3
    min_delta: float = 0.0


def best_snapshots(connection: Connection) -> frozenset[str]:
    """The snapshots with the best headline of their run and suite so far; the newest of several."""
    counts = (points.c.state == PointState.DONE) & points.c.score.is_not(None) & points.c.superseded.is_(False)
    goodness = case((points.c.direction == Direction.MIN, -points.c.score), else_=points.c.score)
    best_first = (goodness.desc(), points.c.step.desc())
    place = func.row_number().over(partition_by=(points.c.run, points.c.suite), order_by=best_first)
    ranked = select(points.c.snapshot_id, place.label("place")).where(counts).subquery()
    return frozenset(connection.execute(select(ranked.c.snapshot_id).where(ranked.c.place == 1)).scalars())


class Advisor:
    """Reads the ledger, and judges what it finds."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def advice(self, run: str, asked: Question = Question()) -> Advice:
        """Whether a run still gets better.

        Raises:
            NotFound: no such run.
            InvalidRequest: the run has no such suite, or its points no such metric.
        """
        with self._db.reading() as connection:
            spec = _spec(connection, run)
            suite = asked.suite or spec.suites[0]
            rows = _done(connection, run, suite)
            if not rows and suite not in spec.suites:
                raise InvalidRequest(f"run {run} has no suite {suite!r}", field="suite", hint=_there_is(spec.suites))
            metric = asked.metric or _headline(rows)
            direction = asked.direction or _direction(rows, metric)
            values = {row["id"]: _value(row, metric) for row in rows}
            scored = [Scored(row["id"], row["step"], v.value) for row in rows if (v := values[row["id"]]) is not None]
            if rows and not scored:
                _refuse_unknown(run, metric, rows)
            judged = judge(scored, direction, patience=asked.patience, min_delta=asked.min_delta)
            by_id = {row["id"]: row for row in rows}
            kept = best_snapshots(connection)
        improved = by_id[judged.improved.point] if judged.improved else None
        best = judged.best
        return Advice(
            run=run,
            suite=suite,
            metric=metric,
            direction=direction,
            patience=asked.patience,
            action=judged.action,
            why=judged.why,
            best=_best(by_id[best.point], values[best.point], kept) if best else None,
            since_step=improved["step"] if improved else None,
            since=improved["ended_at"] if improved else None,
            points_since=judged.since,
            without=len(rows) - len(scored),
        )


def _spec(connection: Connection, run: str) -> RunSpec:
    text = connection.execute(select(runs.c.spec).where(runs.c.run == run)).scalar_one_or_none()
    if text is None:
        raise NotFound(f"no run {run!r}", field="run", hint=f"make it known with PUT /runs/{run}")
    return RunSpec.model_validate_json(text)


def _done(connection: Connection, run: str, suite: str) -> Sequence[RowMapping]:
    columns = (snapshots.c.path, snapshots.c.digest, snapshots.c.held, snapshots.c.deleted_at, snapshots.c.deleting_at)
    query = select(points, *columns).outerjoin(snapshots, snapshots.c.id == points.c.snapshot_id)
    query = query.where(points.c.run == run, points.c.suite == suite, points.c.state == PointState.DONE)
    query = query.where(points.c.superseded.is_(False)).order_by(points.c.step, points.c.seq)
    return connection.execute(query).mappings().all()


def _headline(rows: Sequence[RowMapping]) -> str:
    """The newest point's; `score` where an older version recorded it."""
    return str(rows[-1]["headline"] or "score") if rows else "score"


def _direction(rows: Sequence[RowMapping], metric: str) -> Direction:
    """The suite's, of its headline; more of anything else is better, unless told."""
    if rows and metric in ("score", rows[-1]["headline"]):
        return Direction(rows[-1]["direction"] or Direction.MAX)
    return Direction.MAX


def _value(row: RowMapping, metric: str) -> Metric | None:
    """A point's metric; `score` is whatever its headline was."""
    if metric == "score" or (metric == row["headline"] and row["score"] is not None):
        return Metric(value=row["score"], stderr=row["stderr"], n=0) if row["score"] is not None else None
    found = json.loads(row["metrics"]).get(metric)
    return Metric.model_validate(found) if found else None


def _refuse_unknown(run: str, metric: str, rows: Sequence[RowMapping]) -> None:
    names = sorted({name for row in rows for name in json.loads(row["metrics"])})
    raise InvalidRequest(f"no point of run {run} has a metric {metric!r}", field="metric", hint=_there_is(names))


def _there_is(names: Sequence[str]) -> str:
    return f"there is {', '.join(names)}" if names else "there is none"


def _best(row: RowMapping, value: Metric | None, kept: frozenset[str]) -> Best:
    assert value is not None, "the best point has the metric"
    there = row["deleted_at"] is None and row["deleting_at"] is None
    return Best(
        point=row["id"],
        step=row["step"],
        value=value.value,
        stderr=value.stderr,
        digest=row["digest"],
        snapshot=row["path"] if there else None,
        kept=there and (bool(row["held"]) or row["snapshot_id"] in kept),
    )
