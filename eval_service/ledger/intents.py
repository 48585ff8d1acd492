"""What trainers make gateways write: runs, reservations, arrivals of snapshots, drains. They never move a point.

A new point starts as `reserved` or as `skipped: busy`. An arrival is written as the point's `snapshot_id`; the
controller moves the point to `queued` when it sees it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, bindparam, case, delete, func, insert, literal_column, select, update

from eval_service.contract.errors import Busy, Conflict, InvalidRequest, NotFound
from eval_service.contract.names import check_run
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import (
    DispatchReply,
    DispatchRequest,
    DrainRequest,
    Granted,
    Kind,
    Overflow,
    PointRef,
    RunSpec,
    Source,
)
from eval_service.ledger.bounds import Bounds
from eval_service.ledger.commands import Command, give
from eval_service.ledger.database import Database
from eval_service.ledger.events import drain_moved, points_moved
from eval_service.ledger.receipts import end_drain
from eval_service.ledger.schema import commands, drains, links, points, runs, snapshots
from eval_service.ledger.turn import OPEN_STATES, settle

# What every dispatch asks is built once: SQLAlchemy takes longer to build a statement than SQLite to answer it.
OPEN = points.c.state.in_([literal_column(f"'{state}'") for state in OPEN_STATES])
_RUN = select(runs).where(runs.c.run == bindparam("of")).with_for_update()
_HELD = (
    select(points, snapshots.c.path, snapshots.c.claimed_digest)
    .outerjoin(snapshots, snapshots.c.id == points.c.snapshot_id)
    .where(points.c.reservation == bindparam("of"))
    .order_by(points.c.seq)
)
# A reservation stands for the snapshot that is still to come; suites that share one count once.
IN_FLIGHT = func.count(func.distinct(func.coalesce(points.c.snapshot_id, points.c.reservation)))
_IN_FLIGHT = select(IN_FLIGHT).where(points.c.run == bindparam("of"), OPEN)
_LAST_SEQ = select(func.coalesce(func.max(points.c.seq), 0))
_NEW_POINTS = insert(points)
_NOTE_RUN = update(runs).where(runs.c.run == bindparam("of"))
_AS_ASKED = ("run", "step", "reservation", "kind", "force", "priority", "source")
_FOUND_BY_CHECKS = (
    *("digest", "tensor_digest", "nonce", "manifest", "vocab_size", "admitted_at"),
    *("deleting_at", "deleted_at"),
)


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
            Conflict: it is being deleted.
        """
        self.put_placed(run, self.placed(run, spec))

    def placed(self, run: str, spec: RunSpec) -> RunSpec:
        """What a run is, with the links of its root followed; blocks for as long as the file system does.

        Raises:
            InvalidRequest: a name that can't be one, an unknown suite, or a root outside the service's.
        """
        check_run(run)
        self._bounds.check_suites(spec.suites)
        self._bounds.check_kinds(spec.suites)
        self._bounds.as_written(spec.root, "root")
        return spec.model_copy(update={"root": self._bounds.followed(spec.root, "root")})

    def put_placed(self, run: str, spec: RunSpec) -> None:
        """Write what `placed` made of it.

        Raises:
            Conflict: the run is being deleted.
        """
        text = spec.model_dump_json()
        with self._db.writing() as connection:
            if connection.execute(update(runs).where(runs.c.run == run).values(spec=text)).rowcount == 0:
                new = {"run": run, "spec": text, "state": "active", "paused": False, "created_at": self._db.clock()}
                connection.execute(insert(runs).values(**new))
            else:
                run_row(connection, run, to_change=True)

    def progress(self, run: str, step: int) -> None:
        """Record the trainer's step."""
        with self._db.writing() as connection:
            run_row(connection, run)
            connection.execute(update(runs).where(runs.c.run == run).values(step=step, progress_at=self._db.clock()))

    # --- dispatch

    def dispatch(self, request: DispatchRequest) -> DispatchReply:
        """Reserve a step's points, or hand their snapshot over; the same reservation is the same points.

        Raises:
            NotFound: the run is not known.
            InvalidRequest: an unknown suite, or a snapshot outside the service's roots.
            Conflict: the reservation has another step, run, suite or path; or the run is being deleted.
            Busy: the run is at its bound and the caller would wait.
        """
        path = self.as_written(request) or self.followed(request)
        with self._db.writing() as connection:
            return self.dispatch_within(connection, request, path)

    def as_written(self, request: DispatchRequest) -> str | None:
        """The path that a dispatch's snapshot is known by, if it has one and that can be told as it is written.

        Raises:
            InvalidRequest: it is no absolute path.
        """
        return None if request.snapshot is None else self._bounds.as_written(request.snapshot, "snapshot")

    def followed(self, request: DispatchRequest) -> str | None:
        """The same with its links followed; blocks for as long as the file system does.

        Raises:
            InvalidRequest: it lies outside the service's roots.
        """
        return None if request.snapshot is None else self._bounds.followed(request.snapshot, "snapshot")

    def dispatch_within(self, connection: Connection, request: DispatchRequest, path: str | None) -> DispatchReply:
        """Do what `dispatch` does within a write transaction; what it raises leaves that to be rolled back."""
        run = run_row(connection, request.run, to_change=True)
        held: Sequence[Mapping[Any, Any]] = _points_of(connection, request.reservation)
        if held:
            _same_or_conflict(request, held, path)
            outcome = self._arrive(connection, request, held, path) if path else Granted.KNOWN
        else:
            outcome, held = self._admit(connection, request, RunSpec.model_validate_json(run["spec"]), path)
        _note_run(connection, request, run, self._db.clock())
        return _reply(request, outcome, held)

    def _admit(
        self, connection: Connection, request: DispatchRequest, spec: RunSpec, path: str | None
    ) -> tuple[Granted, Sequence[Mapping[Any, Any]]]:
        suites = request.suites if request.suites is not None else spec.suites
        self._bounds.check_suites(suites)
        self._bounds.check_kinds({*suites, *spec.suites} & set(self._bounds.suites))
        if not suites:
            raise InvalidRequest("no suite is named", field="suites", hint="leave it out for all of the run's")
        verdict = Granted.GRANTED if path is None else Granted.TAKEN
        free = request.deferred or _has_room(connection, request, spec, path)
        if not free and not self._over_bound(connection, request, spec):
            verdict = Granted.SKIPPED
        rows = self._insert(connection, request, suites, verdict)
        if path is not None:
            self._arrive(connection, request, rows, path)
        return verdict, rows

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
    ) -> list[dict[str, Any]]:
        now = self._db.clock()
        seq = connection.execute(_LAST_SEQ).scalar_one()
        skipped = verdict is Granted.SKIPPED
        shared: dict[str, Any] = {
            **{name: getattr(request, name) for name in _AS_ASKED},
            "state": PointState.SKIPPED if skipped else PointState.RESERVED,
            "reason": Reason.BUSY if skipped else None,
            "detail": "the run was at its bound" if skipped else None,
            "ended_at": now if skipped else None,
            "created_at": now,
        }
        rows = [
            shared | {"id": uuid.uuid4().hex, "seq": seq + offset, "suite": suite}
            for offset, suite in enumerate(dict.fromkeys(suites), start=1)
        ]
        connection.execute(_NEW_POINTS, rows)
        points_moved(connection, rows, shared["state"], shared["reason"], now)
        return [row | {"snapshot_id": None, "timings": "{}"} for row in rows]

    def _arrive(
        self, connection: Connection, request: DispatchRequest, held: Sequence[Mapping[Any, Any]], path: str
    ) -> Granted:
        """Name the snapshot of a reservation's points."""
        for row in held:
            _note_costs(connection, row, request)
        if all(row["snapshot_id"] is not None for row in held):
            return Granted.KNOWN
        waits = any(_may_arrive(row) for row in held)
        now = self._db.clock()
        snapshot = _snapshot_id(connection, request, path, now)
        for row in held:
            # An ended point gets it too: so it can be retried, and GC knows whose the directory is.
            if row["snapshot_id"] is None:
                arrival = update(points).where(points.c.id == row["id"])
                connection.execute(arrival.values(snapshot_id=snapshot, source=request.source))
        # Exported because it never heard that there was no room: as if it had not asked.
        unheard = [row["id"] for row in held if request.deferred and row["reason"] == Reason.BUSY]
        for point in unheard:
            give(connection, Command.RETRY, point, None, now)
        if not waits and not unheard:
            settle(connection, snapshot, now)
        return Granted.TAKEN if waits or unheard else Granted.SKIPPED

    # --- drains

    def begin_drain(self, request: DrainRequest) -> str:
        """Record a drain, or find the one that was begun under this id; returns its id."""
        drain = request.drain or str(uuid.uuid4())
        now = self._db.clock()
        with self._db.writing() as connection:
            row = connection.execute(select(drains.c.run).where(drains.c.id == drain)).one_or_none()
            if row is not None:
                if row.run != request.run:
                    raise Conflict(f"drain {drain} is of run {row.run}", field="drain")
                return drain
            run_row(connection, request.run)
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
            drain_moved(connection, drain, request.run, now)
        return drain

    def end_drain(self, drain: str) -> None:
        """Keep a drain's receipt if it is over, where no controller has done so; the first one counts."""
        with self._db.writing() as connection:
            row = connection.execute(select(drains).where(drains.c.id == drain)).mappings().one()
            if row["receipt"] is None:
                end_drain(connection, row, self._db.clock())

    def probe(self) -> None:
        """Whether the ledger can be written.

        Raises:
            Unavailable: it can't.
        """
        with self._db.writing():
            pass


def run_row(connection: Connection, run: str, *, to_change: bool = False) -> RowMapping:
    """A run's row, for the rest of the transaction.

    Raises:
        NotFound: no such run.
        Conflict: it is to be changed, but is being deleted.
    """
    row = connection.execute(_RUN, {"of": run}).mappings().one_or_none()
    if row is None:
        raise NotFound(f"no run {run!r}", field="run", hint=f"make it known with PUT /runs/{run}")
    if to_change and row["deleted_at"] is not None:
        raise Conflict(f"run {run} is being deleted", field="run", hint="use another name, or wait until it is gone")
    return row


def _note_run(connection: Connection, request: DispatchRequest, run: RowMapping, now: float) -> None:
    """A dispatch tells the trainer's step, and reopens a drained run."""
    values: dict[str, Any] = {"state": "active"} if run["state"] == "drained" else {}
    if request.kind is not Kind.MANUAL and not request.deferred and (run["step"] is None or run["step"] < request.step):
        values |= {"step": request.step, "progress_at": now}
    if values:
        connection.execute(_NOTE_RUN, {"of": request.run, **values})


def _points_of(connection: Connection, reservation: str) -> Sequence[RowMapping]:
    return connection.execute(_HELD, {"of": reservation}).mappings().all()


def _same_or_conflict(request: DispatchRequest, held: Sequence[Mapping[Any, Any]], path: str | None) -> None:
    first = held[0]
    if (first["run"], first["step"]) != (request.run, request.step):
        raise Conflict(
            f"reservation {request.reservation} is of run {first['run']}, step {first['step']}", field="reservation"
        )
    strays = sorted(set(request.suites or ()) - {row["suite"] for row in held})
    if strays:
        raise Conflict(
            f"reservation {request.reservation} has no {strays[0]}",
            field="suites",
            hint="reserve further suites under a reservation of their own",
        )
    for row in held:
        if path is not None and row["path"] is not None and row["path"] != path:
            raise Conflict(f"reservation {request.reservation} has another snapshot: {row['path']}", field="snapshot")


def _note_costs(connection: Connection, row: Mapping[Any, Any], request: DispatchRequest) -> None:
    """What the export cost the trainer; the scan may have taken the snapshot in before the trainer could say."""
    asked = {"stall_s": request.stall_s, "export_s": request.export_s, "canary_s": request.canary_s}
    told = {name: value for name, value in asked.items() if value is not None}
    if told:
        timings = json.dumps(json.loads(row["timings"]) | told)
        connection.execute(update(points).where(points.c.id == row["id"]).values(timings=timings))


def _may_arrive(row: Mapping[Any, Any]) -> bool:
    if row["snapshot_id"] is not None:
        return False
    # A reservation that expired while its export ran on is taken up again: the snapshot was paid for.
    late = row["state"] == PointState.SKIPPED and row["reason"] == Reason.RESERVATION_EXPIRED
    return bool(row["state"] == PointState.RESERVED or late)


def _has_room(connection: Connection, request: DispatchRequest, spec: RunSpec, path: str | None) -> bool:
    """Whether the run is below its bound of snapshots in flight, or this one is among them already."""
    if connection.execute(_IN_FLIGHT, {"of": request.run}).scalar_one() < spec.max_in_flight:
        return True
    if path is None:
        return False
    is_open = (points.c.run == request.run) & OPEN
    query = select(points.c.id).join(snapshots, snapshots.c.id == points.c.snapshot_id)
    same = (snapshots.c.step == request.step) & (snapshots.c.path == path)
    return connection.execute(query.where(is_open, same).limit(1)).first() is not None


def _give_way(connection: Connection, run: str, now: float) -> bool:
    """Let the oldest snapshot that only waits and is not forced give way to a later one, with all its points."""
    is_open = (points.c.run == run) & OPEN
    asked = select(commands.c.target).where(commands.c.kind == Command.GIVE_WAY, commands.c.done_at.is_(None))
    stays = (points.c.state != PointState.QUEUED) | points.c.force.is_(True) | points.c.id.in_(asked)
    query = select(points.c.snapshot_id).where(is_open, points.c.snapshot_id.is_not(None))
    query = query.group_by(points.c.snapshot_id).having(func.sum(case((stays, 1), else_=0)) == 0)
    oldest = connection.execute(query.order_by(func.min(points.c.seq)).limit(1)).scalar_one_or_none()
    if oldest is None:
        return False
    of_it = select(points.c.id).where(is_open, points.c.snapshot_id == oldest).order_by(points.c.seq)
    for point in connection.execute(of_it).scalars().all():
        give(connection, Command.GIVE_WAY, point, "gave way to a later point", now)
    return True


def _snapshot_id(connection: Connection, request: DispatchRequest, path: str, now: float) -> str:
    query = select(snapshots).where(snapshots.c.run == request.run, snapshots.c.step == request.step)
    row = connection.execute(query.where(snapshots.c.path == path)).mappings().one_or_none()
    if row is None:
        snapshot = uuid.uuid4().hex
        new = {"id": snapshot, "run": request.run, "step": request.step, "path": path, "source": request.source}
        values = new | {"claimed_digest": request.digest, "created_at": now, "held": False}
        connection.execute(insert(snapshots).values(**values))
        return snapshot
    again: dict[str, Any] = {"settled_at": None}
    if row["deleting_at"] is not None or _may_have_changed(row, request):
        connection.execute(delete(links).where(links.c.snapshot == row["id"]))
        again |= dict.fromkeys(_FOUND_BY_CHECKS) | {"claimed_digest": request.digest, "source": request.source}
    connection.execute(update(snapshots).where(snapshots.c.id == row["id"]).values(**again))
    return str(row["id"])


def _may_have_changed(row: RowMapping, request: DispatchRequest) -> bool:
    """Our own exports are immutable; another's directory is checked again once nothing of it is under way."""
    other = request.digest is not None and request.digest != (row["digest"] or row["claimed_digest"])
    return other or (row["settled_at"] is not None and row["source"] != Source.STAGING)


def _reply(request: DispatchRequest, outcome: Granted, rows: Sequence[Mapping[Any, Any]]) -> DispatchReply:
    if outcome is Granted.KNOWN and all(row["state"] == PointState.SKIPPED for row in rows):
        outcome = Granted.SKIPPED
    refs = tuple(
        PointRef(id=row["id"], suite=row["suite"], state=row["state"], reason=row["reason"], detail=row["detail"])
        for row in rows
    )
    return DispatchReply(
        run=request.run, step=request.step, reservation=request.reservation, outcome=outcome, points=refs
    )
