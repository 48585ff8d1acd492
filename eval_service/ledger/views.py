"""What anybody may read of the ledger, as wire types. Nothing here writes."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, func, select

from eval_service.contract.errors import NotFound
from eval_service.contract.results import Direction
from eval_service.contract.states import PointState
from eval_service.contract.wire import (
    AttemptView,
    FleetView,
    Metric,
    PointPage,
    PointRef,
    PointSort,
    PointView,
    Receipt,
    RunCommandReply,
    RunSpec,
    RunView,
    Source,
    StatusView,
    Timings,
)
from eval_service.ledger.database import CONTROLLER_AT, CONTROLLER_SILENT_S, EPOCH, FLEET, Database
from eval_service.ledger.intents import IN_FLIGHT, OPEN
from eval_service.ledger.receipts import over, receipt
from eval_service.ledger.schema import attempts, commands, drains, points, runs, snapshots
from eval_service.ledger.watching import from_text

_SAME_NAMES = (
    *("id", "run", "step", "suite", "kind", "force", "reservation", "state", "reason", "detail"),
    *("superseded", "source", "weight_version", "pin_proof", "attempts", "score", "stderr", "lag_steps"),
    *("created_at", "queued_at", "started_at", "ended_at", "samples_path"),
    *("headline", "suite_digest"),
)


class Views:
    """Reads of the ledger."""

    def __init__(self, database: Database, *, version: str) -> None:
        self._db = database
        self._version = version

    @property
    def database(self) -> Database:
        """What is read."""
        return self._db

    def point(self, point: str) -> PointView:
        """One point with its attempts.

        Raises:
            NotFound: no such point.
        """
        with self._db.reading() as connection:
            row = connection.execute(_points_query().where(points.c.id == point)).mappings().one_or_none()
            if row is None:
                raise NotFound(f"no point {point}", field="id")
            query = select(attempts).where(attempts.c.point == point).order_by(attempts.c.number)
            history = connection.execute(query).mappings().all()
        return _point_view(row, tuple(_attempt_view(item) for item in history))

    def points(
        self,
        *,
        run: str | None = None,
        state: str | None = None,
        suite: str | None = None,
        step: int | None = None,
        sort: PointSort = PointSort.STEP,
        offset: int = 0,
        limit: int = 1000,
    ) -> PointPage:
        """Points in an order; those that are equal by step, then in the order they were asked for."""
        asked = {points.c.run: run, points.c.state: state, points.c.suite: suite, points.c.step: step}
        conditions = [column == value for column, value in asked.items() if value is not None]
        query = _points_query().where(*conditions).order_by(*_order(sort), points.c.run, points.c.step, points.c.seq)
        with self._db.reading() as connection:
            if run is not None:
                _run(connection, run)
            total = connection.execute(select(func.count()).select_from(points).where(*conditions)).scalar_one()
            rows = connection.execute(query.offset(offset).limit(limit)).mappings().all()
        return PointPage(points=tuple(_point_view(row) for row in rows), total=total)

    def run(self, run: str) -> RunView:
        """One run.

        Raises:
            NotFound: no such run.
        """
        with self._db.reading() as connection:
            (view,) = _run_views(connection, [_run(connection, run)])
            return view

    def runs(self) -> tuple[RunView, ...]:
        """All runs."""
        with self._db.reading() as connection:
            rows = connection.execute(select(runs).order_by(runs.c.created_at)).mappings().all()
            return _run_views(connection, rows)

    def check_run(self, run: str) -> None:
        """See that there is such a run.

        Raises:
            NotFound: there is none.
        """
        with self._db.reading() as connection:
            _run(connection, run)

    def with_room(self, asked: Collection[str]) -> frozenset[str]:
        """Those of some runs that are below their bound, or of which there is something else to say."""
        with self._db.reading() as connection:
            query = select(runs.c.run, runs.c.spec).where(runs.c.run.in_(asked), runs.c.deleted_at.is_(None))
            bounds = {run: int(json.loads(spec)["max_in_flight"]) for run, spec in connection.execute(query)}
            counted = select(points.c.run, IN_FLIGHT).where(points.c.run.in_(asked), OPEN).group_by(points.c.run)
            counts = {run: n for run, n in connection.execute(counted)}
        return frozenset(run for run in asked if run not in bounds or counts.get(run, 0) < bounds[run])

    def fleet(self) -> FleetView:
        """Engines, as the controller last saw them."""
        found = self._db.read_meta(FLEET)
        if found is None:
            return FleetView(groups=(), seen_at=None)
        return FleetView.model_validate_json(found[0]).model_copy(update={"seen_at": found[1]})

    def status(self) -> StatusView:
        """Counts of everything."""
        query = select(points.c.run, points.c.state, func.count().label("n")).group_by(points.c.run, points.c.state)
        with self._db.reading() as connection:
            rows = connection.execute(query).all()
        by_run: dict[str, dict[PointState, int]] = defaultdict(dict)
        total: dict[PointState, int] = defaultdict(int)
        for run, state, n in rows:
            by_run[run][PointState(state)] = n
            total[PointState(state)] += n
        engines = [engine for group in self.fleet().groups for engine in group.engines]
        life = self._db.read_meta(CONTROLLER_AT)
        epoch = self._db.read_meta(EPOCH)
        return StatusView(
            version=self._version,
            epoch=int(epoch[0]) if epoch else 0,
            controller_at=life[1] if life else None,
            controller_alive=self.controller_alive(),
            engines=dict(Counter(str(engine.state) for engine in engines)),
            tokens_per_s={one.id: one.tokens_per_s for one in engines if one.tokens_per_s},
            runs=dict(by_run),
            points=dict(total),
        )

    def reasons(self) -> dict[tuple[str, str, str], int]:
        """How many ended without a result, by run, state and reason."""
        columns = (points.c.run, points.c.state, points.c.reason)
        query = select(*columns, func.count()).where(points.c.reason.is_not(None)).group_by(*columns)
        with self._db.reading() as connection:
            return {(run, state, reason): n for run, state, reason, n in connection.execute(query).all()}

    def controller_alive(self) -> bool:
        """Whether a controller has shown itself within the last seconds."""
        life = self._db.read_meta(CONTROLLER_AT)
        return life is not None and self._db.clock() - life[1] < CONTROLLER_SILENT_S

    def receipt(self, drain: str) -> Receipt:
        """A drain's receipt as it stands; `open` while it waits and its time is not up.

        Raises:
            NotFound: no such drain.
        """
        return self.receipt_as_kept(drain)[0]

    def receipt_as_kept(self, drain: str) -> tuple[Receipt, bool]:
        """A drain's receipt as it stands, and whether it is the one that everybody gets from now on.

        Raises:
            NotFound: no such drain.
        """
        with self._db.reading() as connection:
            row = _drain(connection, drain)
            return receipt(connection, row, self._db.clock()), row["receipt"] is not None

    def drains_over(self, drains_asked: Collection[str]) -> frozenset[str]:
        """Those of some drains that wait no longer, or that are not there; one look for all who wait."""
        with self._db.reading() as connection:
            rows = connection.execute(select(drains).where(drains.c.id.in_(drains_asked))).mappings().all()
            ended = {drain["id"] for drain in over(connection, rows, self._db.clock())}
        return frozenset(ended | (set(drains_asked) - {row["id"] for row in rows}))

    def refreshed(self, reply: RunCommandReply) -> RunCommandReply:
        """A command's reply with its points as they are now."""
        columns = (points.c.id, points.c.suite, points.c.state, points.c.reason, points.c.detail)
        query = select(*columns).where(points.c.id.in_([point.id for point in reply.points])).order_by(points.c.seq)
        with self._db.reading() as connection:
            rows = connection.execute(query).mappings().all()
        return reply.model_copy(update={"points": tuple(PointRef(**row) for row in rows)})

    def carried_out(self, numbers: Collection[int]) -> bool:
        """Whether the controller has dealt with these commands."""
        waiting = commands.c.seq.in_(numbers) & commands.c.done_at.is_(None)
        with self._db.reading() as connection:
            return connection.execute(select(commands.c.seq).where(waiting).limit(1)).first() is None


def _drain(connection: Connection, drain: str) -> RowMapping:
    row = connection.execute(select(drains).where(drains.c.id == drain)).mappings().one_or_none()
    if row is None:
        raise NotFound(f"no drain {drain}", field="id")
    return row


def _run(connection: Connection, run: str) -> RowMapping:
    row = connection.execute(select(runs).where(runs.c.run == run)).mappings().one_or_none()
    if row is None:
        raise NotFound(f"no run {run!r}", field="run", hint=f"make it known with PUT /runs/{run}")
    return row


def _run_views(connection: Connection, rows: Sequence[RowMapping]) -> tuple[RunView, ...]:
    """Three queries, however many runs there are."""
    of_one = [points.c.run == row["run"] for row in rows] if len(rows) == 1 else []
    kept_of_one = [snapshots.c.run == row["run"] for row in rows] if len(rows) == 1 else []
    by_state = select(points.c.run, points.c.state, func.count()).where(*of_one).group_by(points.c.run, points.c.state)
    counts: dict[str, dict[PointState, int]] = defaultdict(dict)
    for run, state, n in connection.execute(by_state):
        counts[run][PointState(state)] = n
    kept = select(snapshots.c.run, func.count()).where(snapshots.c.deleted_at.is_(None), snapshots.c.nonce.is_not(None))
    kept = kept.where(snapshots.c.source == Source.STAGING, *kept_of_one).group_by(snapshots.c.run)
    kept_of = {run: n for run, n in connection.execute(kept)}
    scores: dict[str, dict[str, float]] = defaultdict(dict)
    scored_steps: dict[str, int] = {}
    for run, suite, score, step in connection.execute(_last_scores(of_one)):
        scores[run][suite] = score
        scored_steps[run] = max(step, scored_steps.get(run, step))
    return tuple(
        RunView(
            run=row["run"],
            spec=RunSpec.model_validate_json(row["spec"]),
            state=_run_state(row),
            step=row["step"],
            progress_at=row["progress_at"],
            created_at=row["created_at"],
            points=counts[row["run"]],
            snapshots_kept=kept_of.get(row["run"], 0),
            metrics=scores[row["run"]],
            scored_step=scored_steps.get(row["run"]),
        )
        for row in rows
    )


def _last_scores(of_one: Sequence[ColumnElement[bool]]) -> Select[Any]:
    """The score of each run's and suite's last step that has one."""
    counts = (points.c.state == PointState.DONE) & points.c.superseded.is_(False) & points.c.score.is_not(None)
    last_first = (points.c.step.desc(), points.c.seq.desc())
    place = func.row_number().over(partition_by=(points.c.run, points.c.suite), order_by=last_first).label("place")
    ranked = (
        select(points.c.run, points.c.suite, points.c.score, points.c.step, place).where(counts, *of_one).subquery()
    )
    return select(ranked.c.run, ranked.c.suite, ranked.c.score, ranked.c.step).where(ranked.c.place == 1)


def _run_state(row: RowMapping) -> str:
    if row["deleted_at"] is not None:
        return "deleting"
    return "paused" if row["paused"] else str(row["state"])


def _order(sort: PointSort) -> list[ColumnElement[Any]]:
    if sort is PointSort.STEP:
        return []  # by run first, as an index has them
    column = points.c[sort.removeprefix("-")]
    return [(column.desc() if sort.startswith("-") else column.asc()).nulls_last()]


def _points_query() -> Select[Any]:
    columns = (snapshots.c.path, snapshots.c.digest, snapshots.c.claimed_digest, snapshots.c.held, runs.c.spec)
    query = select(points, *columns).join(runs, runs.c.run == points.c.run)
    return query.outerjoin(snapshots, snapshots.c.id == points.c.snapshot_id)


def _point_view(row: RowMapping, history: tuple[AttemptView, ...] = ()) -> PointView:
    return PointView(
        **{name: row[name] for name in _SAME_NAMES},
        priority=row["priority"] if row["priority"] is not None else json.loads(row["spec"])["priority"],
        held=bool(row["held"]),
        snapshot=row["path"],
        digest=row["digest"] or row["claimed_digest"],
        direction=row["direction"] or Direction.MAX,
        alarms=from_text(row["alarms"]),
        metrics={name: Metric.model_validate(value) for name, value in json.loads(row["metrics"]).items()},
        timings=Timings.model_validate(json.loads(row["timings"])),
        history=history,
    )


def _attempt_view(row: RowMapping) -> AttemptView:
    return AttemptView(
        number=row["number"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        outcome=row["outcome"],
        detail=row["detail"],
        engines=tuple(json.loads(row["engines"])),
    )
