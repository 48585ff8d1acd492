"""What gateways write: runs, reservations, arrivals of snapshots, commands, drains. They never move a point.

A new point starts as `reserved` or as `skipped: busy`. An arrival is written as the point's `snapshot_id`; the
controller moves the point to `queued` when it sees it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, RowMapping, func, insert, select, update

from eval_service.contract.errors import Busy, Conflict, InvalidRequest, NotFound
from eval_service.contract.names import check_run
from eval_service.contract.states import ENDS, PointState, Reason
from eval_service.contract.wire import (
    DispatchReply,
    DispatchRequest,
    DrainRequest,
    Granted,
    Kind,
    Overflow,
    PointRef,
    RunSpec,
)
from eval_service.ledger.database import Database
from eval_service.ledger.schema import commands, drains, points, runs, snapshots

_END_STATES = tuple(state.value for state in ENDS)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the service allows: roots for snapshots, and the suites it has."""

    roots: tuple[Path, ...]
    suites: Collection[str]


class Intents:
    """The gateway's side of the ledger."""

    def __init__(self, database: Database, bounds: Bounds) -> None:
        self._db = database
        self._bounds = bounds

    # --- runs

    def put_run(self, run: str, spec: RunSpec) -> None:
        """Make a run known, or change what it is.

        Raises:
            InvalidRequest: a name that can't be one, an unknown suite, or a root outside the service's.
        """
        check_run(run)
        self._check_suites(spec.suites)
        root = self._inside_roots(spec.root, "root")
        text = spec.model_copy(update={"root": str(root)}).model_dump_json()
        with self._db.writing() as connection:
            if connection.execute(update(runs).where(runs.c.run == run).values(spec=text)).rowcount == 0:
                connection.execute(insert(runs).values(run=run, spec=text, state="active", created_at=self._db.clock()))

    def progress(self, run: str, step: int) -> None:
        """Record the trainer's step."""
        with self._db.writing() as connection:
            _run_row(connection, run)
            connection.execute(update(runs).where(runs.c.run == run).values(step=step, progress_at=self._db.clock()))

    # --- dispatch

    def dispatch(self, request: DispatchRequest) -> DispatchReply:
        """Reserve a step's points, or hand their snapshot over; the same reservation is the same points.

        Raises:
            NotFound: the run is not known.
            InvalidRequest: an unknown suite, or a snapshot outside the service's roots.
            Conflict: the reservation has another step, run or path.
            Busy: the run is at its bound and the caller would wait.
        """
        path = str(self._inside_roots(request.snapshot, "snapshot")) if request.snapshot is not None else None
        with self._db.writing() as connection:
            run = _run_row(connection, request.run)
            held = _points_of(connection, request.reservation)
            if held:
                _same_or_conflict(request, held)
                outcome = self._arrive(connection, request, held, path) if path else Granted.KNOWN
            else:
                outcome = self._admit(connection, request, RunSpec.model_validate_json(run["spec"]), path)
            _note_run(connection, request, run, self._db.clock())
            return _reply(request, outcome, _points_of(connection, request.reservation))

    def _admit(self, connection: Connection, request: DispatchRequest, spec: RunSpec, path: str | None) -> Granted:
        suites = request.suites if request.suites is not None else spec.suites
        self._check_suites(suites)
        if not suites:
            raise InvalidRequest("no suite is named", field="suites", hint="leave it out for all of the run's")
        verdict = Granted.GRANTED if path is None else Granted.TAKEN
        free = request.deferred or _in_flight(connection, request.run) < spec.max_in_flight
        if not free and not self._over_bound(connection, request, spec):
            verdict = Granted.SKIPPED
        self._insert(connection, request, suites, verdict)
        if path is not None and verdict is Granted.TAKEN:
            self._arrive(connection, request, _points_of(connection, request.reservation), path)
        return verdict

    def _over_bound(self, connection: Connection, request: DispatchRequest, spec: RunSpec) -> bool:
        """Whether the point comes in although the run is at its bound."""
        if spec.overflow is Overflow.BACKPRESSURE and (request.wait_s is None or request.wait_s > 0):
            raise Busy(
                f"{request.run} has {spec.max_in_flight} snapshots in flight",
                field="run",
                hint="ask again with the same reservation; wait_s says how long you would wait",
            )
        if request.force:
            return True
        return spec.overflow is Overflow.LATEST and _give_way(connection, request.run, self._db.clock())

    def _insert(
        self, connection: Connection, request: DispatchRequest, suites: Sequence[str], verdict: Granted
    ) -> None:
        now = self._db.clock()
        seq = connection.execute(select(func.coalesce(func.max(points.c.seq), 0))).scalar_one()
        skipped = verdict is Granted.SKIPPED
        for offset, suite in enumerate(dict.fromkeys(suites), start=1):
            connection.execute(
                insert(points).values(
                    id=uuid.uuid4().hex,
                    seq=seq + offset,
                    run=request.run,
                    step=request.step,
                    suite=suite,
                    reservation=request.reservation,
                    kind=request.kind,
                    force=request.force,
                    priority=request.priority,
                    source=request.source,
                    state=PointState.SKIPPED if skipped else PointState.RESERVED,
                    reason=Reason.BUSY if skipped else None,
                    detail="the run was at its bound" if skipped else None,
                    ended_at=now if skipped else None,
                    created_at=now,
                )
            )

    def _arrive(
        self, connection: Connection, request: DispatchRequest, held: Sequence[RowMapping], path: str
    ) -> Granted:
        """Name the snapshot of a reservation's points."""
        for row in held:
            _note_costs(connection, row, request)
        if all(row["snapshot_id"] is not None for row in held):
            return Granted.KNOWN
        open_rows = [row for row in held if _may_arrive(row)]
        if not open_rows:
            return Granted.SKIPPED
        snapshot = _snapshot_id(connection, request, path, self._db.clock())
        for row in open_rows:
            arrival = update(points).where(points.c.id == row["id"])
            connection.execute(arrival.values(snapshot_id=snapshot, source=request.source))
        return Granted.TAKEN

    # --- commands and drains

    def report_export_failed(self, point: str, detail: str, reason: Reason = Reason.EXPORT_FAILED) -> None:
        """Say that a reserved point gets no snapshot; the controller ends it."""
        with self._db.writing() as connection:
            row = connection.execute(select(points).where(points.c.id == point)).mappings().one_or_none()
            if row is None:
                raise NotFound(f"no point {point}", field="id")
            if row["state"] not in (PointState.RESERVED, PointState.SKIPPED):
                raise Conflict(f"the point is {row['state']}", field="id", hint="only a reserved point can be reported")
            _command(connection, reason, point, detail, self._db.clock())

    def begin_drain(self, request: DrainRequest) -> str:
        """Record a drain, or find the one that was begun under this id; returns its id."""
        drain = request.drain or str(uuid.uuid4())
        now = self._db.clock()
        with self._db.writing() as connection:
            _run_row(connection, request.run)
            row = connection.execute(select(drains.c.run).where(drains.c.id == drain)).one_or_none()
            if row is not None:
                if row.run != request.run:
                    raise Conflict(f"drain {drain} is of run {row.run}", field="drain")
                return drain
            connection.execute(
                insert(drains).values(
                    id=drain,
                    run=request.run,
                    planned=json.dumps([point.model_dump() for point in request.planned]),
                    on_timeout=request.on_timeout,
                    started_at=now,
                    deadline=now + request.timeout_s,
                )
            )
        return drain

    def end_drain(self, drain: str, receipt: str) -> None:
        """Keep a drain's receipt; the first one counts."""
        with self._db.writing() as connection:
            ended = connection.execute(
                update(drains)
                .where(drains.c.id == drain, drains.c.ended_at.is_(None))
                .values(ended_at=self._db.clock(), receipt=receipt)
            )
            if ended.rowcount:
                run = select(drains.c.run).where(drains.c.id == drain).scalar_subquery()
                connection.execute(update(runs).where(runs.c.run == run).values(state="drained"))

    def probe(self) -> None:
        """Whether the ledger can be written.

        Raises:
            Unavailable: it can't.
        """
        with self._db.writing():
            pass

    # --- checks

    def _check_suites(self, suites: Sequence[str]) -> None:
        for suite in suites:
            if suite not in self._bounds.suites:
                known = ", ".join(sorted(self._bounds.suites))
                raise InvalidRequest(f"no suite {suite!r}", field="suites", hint=f"the service has: {known}")

    def _inside_roots(self, path: str, field: str) -> Path:
        if "\0" in path or not Path(path).is_absolute():
            raise InvalidRequest(f"{path!r} is no absolute path", field=field)
        resolved = Path(path).resolve()
        if not any(resolved.is_relative_to(root) for root in self._bounds.roots):
            raise InvalidRequest(
                f"{path} lies outside the service's roots",
                field=field,
                hint="put it under one of service.roots in fleet.toml, or add its directory there",
            )
        return resolved


def _run_row(connection: Connection, run: str) -> RowMapping:
    row = connection.execute(select(runs).where(runs.c.run == run).with_for_update()).mappings().one_or_none()
    if row is None:
        raise NotFound(f"no run {run!r}", field="run", hint=f"make it known with PUT /runs/{run}")
    return row


def _note_run(connection: Connection, request: DispatchRequest, run: RowMapping, now: float) -> None:
    """A dispatch tells the trainer's step, and reopens a drained run."""
    values: dict[str, Any] = {"state": "active"} if run["state"] == "drained" else {}
    if request.kind is not Kind.MANUAL and not request.deferred and (run["step"] or 0) < request.step:
        values |= {"step": request.step, "progress_at": now}
    if values:
        connection.execute(update(runs).where(runs.c.run == request.run).values(**values))


def _points_of(connection: Connection, reservation: str) -> Sequence[RowMapping]:
    query = select(points, snapshots.c.path, snapshots.c.claimed_digest)
    query = query.outerjoin(snapshots, snapshots.c.id == points.c.snapshot_id)
    return connection.execute(query.where(points.c.reservation == reservation).order_by(points.c.seq)).mappings().all()


def _same_or_conflict(request: DispatchRequest, held: Sequence[RowMapping]) -> None:
    first = held[0]
    if (first["run"], first["step"]) != (request.run, request.step):
        raise Conflict(
            f"reservation {request.reservation} is of run {first['run']}, step {first['step']}", field="reservation"
        )
    for row in held:
        if request.snapshot is None or row["path"] is None:
            continue
        if row["path"] != str(Path(request.snapshot).resolve()):
            raise Conflict(f"reservation {request.reservation} has another snapshot: {row['path']}", field="snapshot")


def _note_costs(connection: Connection, row: RowMapping, request: DispatchRequest) -> None:
    """What the export cost the trainer; the scan may have taken the snapshot in before the trainer could say."""
    asked = {"stall_s": request.stall_s, "export_s": request.export_s, "canary_s": request.canary_s}
    told = {name: value for name, value in asked.items() if value is not None}
    if told:
        timings = json.dumps(json.loads(row["timings"]) | told)
        connection.execute(update(points).where(points.c.id == row["id"]).values(timings=timings))


def _may_arrive(row: RowMapping) -> bool:
    if row["snapshot_id"] is not None:
        return False
    # A reservation that expired while its export ran on is taken up again: the snapshot was paid for.
    late = row["state"] == PointState.SKIPPED and row["reason"] == Reason.RESERVATION_EXPIRED
    return bool(row["state"] == PointState.RESERVED or late)


def _in_flight(connection: Connection, run: str) -> int:
    """Snapshots of a run that have not settled; each reservation is one."""
    query = select(func.count(func.distinct(points.c.reservation)))
    return connection.execute(query.where(points.c.run == run, points.c.state.not_in(_END_STATES))).scalar_one()


def _give_way(connection: Connection, run: str, now: float) -> bool:
    """Let the oldest queued point that is not forced give way to a later one."""
    asked = select(commands.c.target).where(commands.c.kind == Reason.BUSY, commands.c.done_at.is_(None))
    query = (
        select(points.c.id)
        .where(points.c.run == run, points.c.state == PointState.QUEUED, points.c.force.is_(False))
        .where(points.c.id.not_in(asked))
    )
    oldest = connection.execute(query.order_by(points.c.seq).limit(1)).scalar_one_or_none()
    if oldest is None:
        return False
    _command(connection, Reason.BUSY, oldest, "gave way to a later point", now)
    return True


def _command(connection: Connection, kind: str, target: str, detail: str | None, now: float) -> None:
    connection.execute(insert(commands).values(kind=kind, target=target, detail=detail, created_at=now))


def _snapshot_id(connection: Connection, request: DispatchRequest, path: str, now: float) -> str:
    query = select(snapshots).where(snapshots.c.run == request.run, snapshots.c.step == request.step)
    row = connection.execute(query.where(snapshots.c.path == path)).mappings().one_or_none()
    if row is not None:
        connection.execute(update(snapshots).where(snapshots.c.id == row["id"]).values(settled_at=None))
        return str(row["id"])
    snapshot = uuid.uuid4().hex
    connection.execute(
        insert(snapshots).values(
            id=snapshot,
            run=request.run,
            step=request.step,
            path=path,
            source=request.source,
            claimed_digest=request.digest,
            created_at=now,
            held=False,
        )
    )
    return snapshot


def _reply(request: DispatchRequest, outcome: Granted, rows: Sequence[RowMapping]) -> DispatchReply:
    if outcome is Granted.KNOWN and all(row["state"] == PointState.SKIPPED for row in rows):
        outcome = Granted.SKIPPED
    refs = tuple(
        PointRef(id=row["id"], suite=row["suite"], state=row["state"], reason=row["reason"], detail=row["detail"])
        for row in rows
    )
    return DispatchReply(
        run=request.run, step=request.step, reservation=request.reservation, outcome=outcome, points=refs
    )
