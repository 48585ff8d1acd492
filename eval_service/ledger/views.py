"""What anybody may read of the ledger, as wire types. Nothing here writes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, func, select

from eval_service.contract.errors import NotFound
from eval_service.contract.states import ENDS, PointState
from eval_service.contract.wire import (
    AttemptView,
    EndedPoint,
    FleetView,
    Metric,
    PointPage,
    PointView,
    Receipt,
    RunSpec,
    RunView,
    StatusView,
    Timings,
)
from eval_service.ledger.database import EPOCH, Database
from eval_service.ledger.moves import CONTROLLER_AT, FLEET
from eval_service.ledger.schema import attempts, drains, points, runs, snapshots

CONTROLLER_SILENT_S = 5.0
_ENDS = tuple(state.value for state in ENDS)
_SAME_NAMES = (
    *("id", "run", "step", "suite", "kind", "force", "priority", "reservation", "state", "reason", "detail"),
    *("superseded", "source", "weight_version", "pin_proof", "attempts", "score", "stderr", "lag_steps"),
    *("created_at", "queued_at", "started_at", "ended_at", "samples_path"),
)


class Views:
    """Reads of the ledger."""

    def __init__(self, database: Database, *, version: str) -> None:
        self._db = database
        self._version = version

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
        offset: int = 0,
        limit: int = 1000,
    ) -> PointPage:
        """Points by step, then in the order they were asked for."""
        asked = {points.c.run: run, points.c.state: state, points.c.suite: suite, points.c.step: step}
        conditions = [column == value for column, value in asked.items() if value is not None]
        query = _points_query().where(*conditions).order_by(points.c.run, points.c.step, points.c.seq)
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
            return _run_view(connection, _run(connection, run))

    def runs(self) -> tuple[RunView, ...]:
        """All runs."""
        with self._db.reading() as connection:
            rows = connection.execute(select(runs).order_by(runs.c.created_at)).mappings().all()
            return tuple(_run_view(connection, row) for row in rows)

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
        engines: dict[str, int] = defaultdict(int)
        for group in self.fleet().groups:
            for engine in group.engines:
                engines[engine.state] += 1
        life = self._db.read_meta(CONTROLLER_AT)
        epoch = self._db.read_meta(EPOCH)
        return StatusView(
            version=self._version,
            epoch=int(epoch[0]) if epoch else 0,
            controller_at=life[1] if life else None,
            controller_alive=self.controller_alive(),
            engines=dict(engines),
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
        with self._db.reading() as connection:
            row = connection.execute(select(drains).where(drains.c.id == drain)).mappings().one_or_none()
            if row is None:
                raise NotFound(f"no drain {drain}", field="id")
            if row["receipt"] is not None:
                return Receipt.model_validate_json(row["receipt"])
            found = connection.execute(_points_query().where(points.c.run == row["run"])).mappings().all()
        return _receipt(row, current(found), self._db.clock())


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


def _rank(row: RowMapping) -> tuple[bool, int]:
    lives_or_came = row["snapshot_id"] is not None or row["state"] not in _ENDS
    return (lives_or_came, row["seq"])


def _receipt(drain: RowMapping, rows: Sequence[RowMapping], now: float) -> Receipt:
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
    drained = not lists["pending"]
    timed_out = not drained and now >= drain["deadline"] and _abort_is_over(drain, now)
    return Receipt(
        drain=drain["id"],
        run=drain["run"],
        open=not drained and not timed_out,
        drained=drained,
        timed_out=timed_out or drain["aborted_at"] is not None,
        started_at=drain["started_at"],
        ended_at=None if not drained and not timed_out else now,
        deadline=drain["deadline"],
        **{name: tuple(lines) for name, lines in lists.items()},
    )


def _abort_is_over(drain: RowMapping, now: float) -> bool:
    """With `abort` the controller first cancels what is left; a dead one is not waited for beyond a few seconds."""
    if drain["on_timeout"] != "abort":
        return True
    return drain["aborted_at"] is not None or now > drain["deadline"] + 2 * CONTROLLER_SILENT_S


def _run(connection: Connection, run: str) -> RowMapping:
    row = connection.execute(select(runs).where(runs.c.run == run)).mappings().one_or_none()
    if row is None:
        raise NotFound(f"no run {run!r}", field="run", hint=f"make it known with PUT /runs/{run}")
    return row


def _run_view(connection: Connection, row: RowMapping) -> RunView:
    by_state = select(points.c.state, func.count()).where(points.c.run == row["run"]).group_by(points.c.state)
    counts = {PointState(state): n for state, n in connection.execute(by_state).all()}
    kept = select(func.count()).select_from(snapshots)
    kept = kept.where(snapshots.c.run == row["run"], snapshots.c.deleted_at.is_(None), snapshots.c.source == "staging")
    done = select(points.c.suite, points.c.score).where(points.c.run == row["run"], points.c.state == PointState.DONE)
    scores = connection.execute(done.where(points.c.score.is_not(None)).order_by(points.c.step, points.c.seq)).all()
    return RunView(
        run=row["run"],
        spec=RunSpec.model_validate_json(row["spec"]),
        state=row["state"],
        step=row["step"],
        progress_at=row["progress_at"],
        created_at=row["created_at"],
        points=counts,
        snapshots_kept=connection.execute(kept).scalar_one(),
        metrics={suite: score for suite, score in scores},
    )


def _points_query() -> Select[Any]:
    query = select(points, snapshots.c.path, snapshots.c.digest, snapshots.c.claimed_digest)
    return query.outerjoin(snapshots, snapshots.c.id == points.c.snapshot_id)


def _point_view(row: RowMapping, history: tuple[AttemptView, ...] = ()) -> PointView:
    return PointView(
        **{name: row[name] for name in _SAME_NAMES},
        snapshot=row["path"],
        digest=row["digest"] or row["claimed_digest"],
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
