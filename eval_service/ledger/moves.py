"""What the acting controller writes: it alone moves points, every move by the table, every write under its epoch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, RowMapping, insert, select, update

from eval_service.contract.manifest import Manifest
from eval_service.contract.states import ENDS, LIVE, PinProof, PointState, Reason, check_transition
from eval_service.contract.wire import Metric
from eval_service.ledger.database import Database, put
from eval_service.ledger.schema import attempts, commands, drains, points, runs, snapshots

CONTROLLER_AT = "controller_at"
FLEET = "fleet"
_ENDS = tuple(state.value for state in ENDS)
_LIVE = tuple(state.value for state in LIVE)


@dataclass(frozen=True, slots=True)
class Runnable:
    """A queued point whose snapshot is admitted; what the scheduler and a lane need of it."""

    id: str
    seq: int
    run: str
    step: int
    suite: str
    force: bool
    priority: int
    attempts: int
    queued_at: float
    max_engines: int | None
    root: str
    snapshot: str  # directory
    snapshot_id: str
    digest: str
    tensor_digest: str
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Unadmitted:
    """A snapshot that queued points wait for, not checked yet."""

    id: str
    run: str
    step: int
    path: str
    source: str
    claimed_digest: str | None
    queued_at: float


@dataclass(frozen=True, slots=True)
class Facts:
    """What the admission checks found."""

    manifest: Manifest
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Result:
    """A point's result, written once."""

    metrics: dict[str, Metric]
    score: float | None
    stderr: float | None
    samples_path: str
    weight_version: str
    pin_proof: PinProof
    engines: tuple[str, ...]
    timings: dict[str, float] = field(default_factory=dict)


class Moves:
    """The controller's side of the ledger, under one epoch."""

    def __init__(self, database: Database, epoch: int, *, max_attempts: int) -> None:
        self._db = database
        self.epoch = epoch
        self._max_attempts = max_attempts

    # --- intents

    def recover(self) -> int:
        """Queue again what a former controller had in its hands; that is no fault of the point's."""
        with self._db.acting(self.epoch) as connection:
            rows = connection.execute(select(points).where(points.c.state.in_(_LIVE))).mappings().all()
            for row in rows:
                self._end_attempt(connection, row, "controller_lost", None)
                self._move(connection, row, PointState.QUEUED)
        return len(rows)

    def take_intents(self, *, reservation_timeout_s: float) -> int:
        """Carry out what gateways wrote: arrivals, commands, and reservations that nobody used. Returns how many."""
        with self._db.acting(self.epoch) as connection:
            done = self._take_arrivals(connection)
            done += self._take_commands(connection)
            done += self._expire(connection, reservation_timeout_s)
            return done

    def show_life(self, fleet: str) -> None:
        """Write the controller's sign of life and the fleet as it sees it."""
        now = self._db.clock()
        with self._db.acting(self.epoch) as connection:
            put(connection, CONTROLLER_AT, str(self.epoch), now)
            put(connection, FLEET, fleet, now)

    def abort_overdue_drains(self) -> int:
        """Cancel what is left of runs whose drain asked for that at its deadline."""
        now = self._db.clock()
        with self._db.acting(self.epoch) as connection:
            overdue = select(drains).where(drains.c.deadline <= now, drains.c.on_timeout == "abort")
            rows = connection.execute(overdue.where(drains.c.aborted_at.is_(None))).mappings().all()
            for drain in rows:
                left = select(points).where(points.c.run == drain["run"], points.c.state.not_in(_ENDS))
                for row in connection.execute(left).mappings().all():
                    self._end(connection, row, PointState.CANCELLED, Reason.DRAIN_TIMEOUT, f"drain {drain['id']}")
                connection.execute(update(drains).where(drains.c.id == drain["id"]).values(aborted_at=now))
        return len(rows)

    # --- admission

    def unadmitted(self) -> list[Unadmitted]:
        """Snapshots that queued points wait for."""
        query = (
            select(snapshots, points.c.queued_at)
            .join(points, points.c.snapshot_id == snapshots.c.id)
            .where(points.c.state == PointState.QUEUED, snapshots.c.admitted_at.is_(None))
            .order_by(points.c.seq)
        )
        with self._db.reading() as connection:
            rows = connection.execute(query).mappings().all()
        found: dict[str, Unadmitted] = {}
        for row in rows:
            columns = ("id", "run", "step", "path", "source", "claimed_digest", "queued_at")
            found.setdefault(row["id"], Unadmitted(**{name: row[name] for name in columns}))
        return list(found.values())

    def admit(self, snapshot: str, facts: Facts) -> None:
        """The checks passed: keep what they found, and let newer points supersede older ones."""
        manifest = facts.manifest
        with self._db.acting(self.epoch) as connection:
            connection.execute(
                update(snapshots)
                .where(snapshots.c.id == snapshot)
                .values(
                    digest=manifest.digest,
                    tensor_digest=manifest.tensor_digest,
                    nonce=manifest.nonce,
                    manifest=manifest.model_dump_json(),
                    vocab_size=facts.vocab_size,
                    admitted_at=self._db.clock(),
                )
            )
            for row in _points_on(connection, snapshot, PointState.QUEUED):
                self._supersede(connection, row, manifest.digest)

    def refuse(self, snapshot: str, reason: Reason, detail: str) -> None:
        """The checks failed: every point that waits for it is skipped."""
        with self._db.acting(self.epoch) as connection:
            for row in _points_on(connection, snapshot, PointState.QUEUED):
                self._end(connection, row, PointState.SKIPPED, reason, detail)

    # --- points

    def runnable(self) -> list[Runnable]:
        """Queued points whose snapshots are admitted, in the order they were asked for."""
        query = (
            select(points, snapshots.c.path, snapshots.c.digest, snapshots.c.tensor_digest, snapshots.c.vocab_size)
            .add_columns(runs.c.spec, runs.c.state.label("run_state"))
            .join(snapshots, snapshots.c.id == points.c.snapshot_id)
            .join(runs, runs.c.run == points.c.run)
            .where(points.c.state == PointState.QUEUED, snapshots.c.admitted_at.is_not(None))
            .order_by(points.c.seq)
        )
        with self._db.reading() as connection:
            rows = connection.execute(query).mappings().all()
        return [_runnable(row) for row in rows if row["run_state"] != "paused"]

    def manifest(self, snapshot: str) -> Manifest:
        """An admitted snapshot's manifest."""
        with self._db.reading() as connection:
            text = connection.execute(select(snapshots.c.manifest).where(snapshots.c.id == snapshot)).scalar_one()
        return Manifest.model_validate_json(text)

    def begin_attempt(self, point: str) -> int | None:
        """`queued -> pinning`; returns the attempt's number, None where the point is no longer queued."""
        now = self._db.clock()
        with self._db.acting(self.epoch) as connection:
            row = _point(connection, point)
            if row["state"] != PointState.QUEUED:
                return None
            number = row["attempts"] + 1
            self._move(connection, row, PointState.PINNING, attempts=number, started_at=now)
            connection.execute(
                insert(attempts).values(point=point, number=number, epoch=self.epoch, started_at=now, engines="[]")
            )
            return int(number)

    def advance(self, point: str, new: PointState) -> bool:
        """`pinning -> running -> scoring`; False where somebody ended the point meanwhile."""
        with self._db.acting(self.epoch) as connection:
            row = _point(connection, point)
            if row["state"] in _ENDS:
                return False
            self._move(connection, row, new)
            return True

    def finish(self, point: str, result: Result) -> bool:
        """`scoring -> done` with its result; False where somebody ended the point meanwhile."""
        now = self._db.clock()
        with self._db.acting(self.epoch) as connection:
            row = _point(connection, point)
            if row["state"] != PointState.SCORING:
                return False
            timings = json.loads(row["timings"]) | result.timings
            timings |= {"queue_s": row["started_at"] - row["queued_at"], "duration_s": now - row["queued_at"]}
            self._end_attempt(connection, row, "done", None, result.engines)
            self._move(
                connection,
                row,
                PointState.DONE,
                metrics=json.dumps({name: metric.model_dump() for name, metric in result.metrics.items()}),
                score=result.score,
                stderr=result.stderr,
                samples_path=result.samples_path,
                weight_version=result.weight_version,
                pin_proof=result.pin_proof,
                timings=json.dumps(timings),
            )
            return True

    def end(self, point: str, state: PointState, reason: Reason, detail: str) -> bool:
        """End a point without a result; False where it has ended already."""
        with self._db.acting(self.epoch) as connection:
            row = _point(connection, point)
            if row["state"] in _ENDS:
                return False
            self._end(connection, row, state, reason, detail)
            return True

    def requeue(self, point: str, fault: str, detail: str, engines: Sequence[str] = ()) -> PointState:
        """An infrastructure fault: back to `queued`, until `max_attempts`. Returns the state it is in now."""
        with self._db.acting(self.epoch) as connection:
            row = _point(connection, point)
            if row["state"] not in _LIVE:
                return PointState(row["state"])
            faults = row["faults"] + 1
            self._end_attempt(connection, row, fault, detail, engines)
            if faults >= self._max_attempts:
                self._end(connection, row, PointState.FAILED, Reason.MAX_ATTEMPTS, f"{fault}: {detail}", faults=faults)
                return PointState.FAILED
            self._move(connection, row, PointState.QUEUED, faults=faults, detail=f"{fault}: {detail}")
            return PointState.QUEUED

    def overdue(self, point_timeout_s: float) -> list[str]:
        """Points that have been queued or tried for longer than a point may take."""
        waiting = points.c.state.in_((PointState.QUEUED.value, *_LIVE))
        query = select(points.c.id).where(waiting, points.c.queued_at < self._db.clock() - point_timeout_s)
        with self._db.reading() as connection:
            return list(connection.execute(query).scalars())

    def end_unserved(self, point: str, detail: str) -> None:
        """A queued point's time is up: it was tried (`failed: deadline`), or no engine came (`skipped: unhealthy`)."""
        with self._db.acting(self.epoch) as connection:
            row = _point(connection, point)
            if row["state"] == PointState.QUEUED and row["attempts"]:
                self._end(connection, row, PointState.FAILED, Reason.DEADLINE, detail)
            elif row["state"] == PointState.QUEUED:
                self._end(connection, row, PointState.SKIPPED, Reason.UNHEALTHY, f"no engine came: {detail}")

    def state(self, point: str) -> PointState:
        """A point's state now."""
        with self._db.reading() as connection:
            return PointState(_point(connection, point)["state"])

    # --- how

    def _take_arrivals(self, connection: Connection) -> int:
        query = select(points, snapshots.c.digest, snapshots.c.admitted_at).join(
            snapshots, snapshots.c.id == points.c.snapshot_id
        )
        late = (points.c.state == PointState.SKIPPED) & (points.c.reason == Reason.RESERVATION_EXPIRED)
        rows = connection.execute(query.where((points.c.state == PointState.RESERVED) | late)).mappings().all()
        for row in rows:
            self._move(connection, row, PointState.QUEUED, queued_at=self._db.clock())
            if row["admitted_at"] is not None:
                self._supersede(connection, row, row["digest"])
        return len(rows)

    def _take_commands(self, connection: Connection) -> int:
        rows = connection.execute(select(commands).where(commands.c.done_at.is_(None))).mappings().all()
        for row in rows:
            point = _point(connection, row["target"])
            reason = Reason(row["kind"])
            unused = point["state"] == PointState.RESERVED and point["snapshot_id"] is None
            gives_way = reason is Reason.BUSY and point["state"] == PointState.QUEUED
            if unused or gives_way:
                self._end(connection, point, PointState.SKIPPED, reason, row["detail"] or "")
            connection.execute(update(commands).where(commands.c.seq == row["seq"]).values(done_at=self._db.clock()))
        return len(rows)

    def _expire(self, connection: Connection, timeout_s: float) -> int:
        query = select(points).where(points.c.state == PointState.RESERVED, points.c.snapshot_id.is_(None))
        rows = connection.execute(query.where(points.c.created_at < self._db.clock() - timeout_s)).mappings().all()
        for row in rows:
            detail = f"no snapshot came within {timeout_s:.0f} s"
            self._end(connection, row, PointState.SKIPPED, Reason.RESERVATION_EXPIRED, detail)
        return len(rows)

    def _supersede(self, connection: Connection, row: RowMapping, digest: str) -> None:
        """The newest of a (run, step, suite) counts; the same content that is still on its way counts as it is."""
        query = (
            select(points, snapshots.c.digest)
            .join(snapshots, snapshots.c.id == points.c.snapshot_id)
            .where(points.c.run == row["run"], points.c.step == row["step"], points.c.suite == row["suite"])
            .where(points.c.seq < row["seq"], points.c.superseded.is_(False))
        )
        for older in connection.execute(query).mappings().all():
            if older["state"] not in _ENDS and older["digest"] == digest:
                detail = f"the same snapshot is point {older['id']}"
                self._end(connection, row, PointState.CANCELLED, Reason.SUPERSEDED, detail, superseded=True)
                return
            if older["state"] in _ENDS:
                connection.execute(update(points).where(points.c.id == older["id"]).values(superseded=True))
            else:
                detail = f"by point {row['id']}"
                self._end(connection, older, PointState.CANCELLED, Reason.SUPERSEDED, detail, superseded=True)

    def _end(
        self, connection: Connection, row: RowMapping, state: PointState, reason: Reason, detail: str, **values: Any
    ) -> None:
        if row["state"] in _LIVE:
            self._end_attempt(connection, row, str(reason), detail)
        self._move(connection, row, state, reason=reason, detail=detail[:4000], **values)

    def _move(self, connection: Connection, row: RowMapping, new: PointState, **values: Any) -> None:
        old = PointState(row["state"])
        check_transition(old, new, values.get("reason"))
        if new in ENDS:
            step = select(runs.c.step).where(runs.c.run == row["run"]).scalar_subquery()
            values |= {"ended_at": self._db.clock(), "lag_steps": step - row["step"]}
        else:
            values = {"reason": None, "ended_at": None, **values}
        connection.execute(update(points).where(points.c.id == row["id"]).values(state=new, **values))
        if new in ENDS and row["snapshot_id"] is not None:
            _settle(connection, row["snapshot_id"], self._db.clock())

    def _end_attempt(
        self,
        connection: Connection,
        row: RowMapping,
        outcome: str,
        detail: str | None,
        engines: Iterable[str] = (),
    ) -> None:
        connection.execute(
            update(attempts)
            .where(attempts.c.point == row["id"], attempts.c.number == row["attempts"], attempts.c.ended_at.is_(None))
            .values(ended_at=self._db.clock(), outcome=outcome, detail=detail, engines=json.dumps(list(engines)))
        )


def _point(connection: Connection, point: str) -> RowMapping:
    return connection.execute(select(points).where(points.c.id == point)).mappings().one()


def _points_on(connection: Connection, snapshot: str, state: PointState) -> Sequence[RowMapping]:
    query = select(points).where(points.c.snapshot_id == snapshot, points.c.state == state)
    return connection.execute(query.order_by(points.c.seq)).mappings().all()


def _settle(connection: Connection, snapshot: str, now: float) -> None:
    """A snapshot settles when its last point has ended."""
    left = select(points.c.id).where(points.c.snapshot_id == snapshot, points.c.state.not_in(_ENDS)).limit(1)
    if connection.execute(left).first() is None:
        connection.execute(update(snapshots).where(snapshots.c.id == snapshot).values(settled_at=now))


def _runnable(row: RowMapping) -> Runnable:
    spec = json.loads(row["spec"])
    names = ("id", "seq", "run", "step", "suite", "force", "priority", "attempts", "queued_at", "snapshot_id")
    return Runnable(
        **{name: row[name] for name in names},
        max_engines=spec["max_engines"],
        root=spec["root"],
        snapshot=row["path"],
        digest=row["digest"],
        tensor_digest=row["tensor_digest"],
        vocab_size=row["vocab_size"],
    )
