"""What trainers make gateways write: runs, reservations, arrivals of snapshots, drains. They never move a point.

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

from sqlalchemy import Connection, RowMapping, case, delete, func, insert, select, update

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
    Source,
)
from eval_service.ledger.commands import Command, give
from eval_service.ledger.database import Database
from eval_service.ledger.receipts import end_drain
from eval_service.ledger.schema import commands, drains, links, points, runs, snapshots
from eval_service.ledger.turn import settle

_OPEN_STATES = tuple(state.value for state in PointState if state not in ENDS)
_FOUND_BY_CHECKS = (
    *("digest", "tensor_digest", "nonce", "manifest", "vocab_size", "admitted_at"),
    *("deleting_at", "deleted_at"),
)


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
            Conflict: it is being deleted.
        """
        check_run(run)
        self._check_suites(spec.suites)
        root = self._inside_roots(spec.root, "root")
        text = spec.model_copy(update={"root": str(root)}).model_dump_json()
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
        path = str(self._inside_roots(request.snapshot, "snapshot")) if request.snapshot is not None else None
        with self._db.writing() as connection:
            run = run_row(connection, request.run, to_change=True)
            held = _points_of(connection, request.reservation)
            if held:
                _same_or_conflict(request, held, path)
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
        free = request.deferred or _has_room(connection, request, spec, path)
        if not free and not self._over_bound(connection, request, spec):
            verdict = Granted.SKIPPED
        self._insert(connection, request, suites, verdict)
        if path is not None:
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
        waits = any(_may_arrive(row) for row in held)
        now = self._db.clock()
        snapshot = _snapshot_id(connection, request, path, now)
        for row in held:
            # An ended point gets it too: so it can be retried, and GC knows whose the directory is.
            if row["snapshot_id"] is None:
                arrival = update(points).where(points.c.id == row["id"])
                connection.execute(arrival.values(snapshot_id=snapshot, source=request.source))
        if not waits:
            settle(connection, snapshot, now)
        return Granted.TAKEN if waits else Granted.SKIPPED

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

    # --- checks

    def _check_suites(self, suites: Sequence[str]) -> None:
        for suite in suites:
            if suite not in self._bounds.suites:
                known = ", ".join(sorted(self._bounds.suites))
                raise InvalidRequest(f"no suite {suite!r}", field="suites", hint=f"the service has: {known}")

    def _inside_roots(self, path: str, field: str) -> Path:
        if "\0" in path or not Path(path).is_absolute():
            raise InvalidRequest(f"{path!r} is no absolute path", field=field)
        try:
            resolved = Path(path).resolve()
        except (OSError, RuntimeError, ValueError) as exc:  # a loop of links, or a name that can't be one
            raise InvalidRequest(f"{path!r} can't be resolved", field=field) from exc
        if not any(resolved.is_relative_to(root) for root in self._bounds.roots):
            raise InvalidRequest(
                f"{path} lies outside the service's roots",
                field=field,
                hint="put it under one of service.roots in fleet.toml, or add its directory there",
            )
        return resolved


def run_row(connection: Connection, run: str, *, to_change: bool = False) -> RowMapping:
    """A run's row, for the rest of the transaction.

    Raises:
        NotFound: no such run.
        Conflict: it is to be changed, but is being deleted.
    """
    row = connection.execute(select(runs).where(runs.c.run == run).with_for_update()).mappings().one_or_none()
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
        connection.execute(update(runs).where(runs.c.run == request.run).values(**values))


def _points_of(connection: Connection, reservation: str) -> Sequence[RowMapping]:
    query = select(points, snapshots.c.path, snapshots.c.claimed_digest)
    query = query.outerjoin(snapshots, snapshots.c.id == points.c.snapshot_id)
    return connection.execute(query.where(points.c.reservation == reservation).order_by(points.c.seq)).mappings().all()


def _same_or_conflict(request: DispatchRequest, held: Sequence[RowMapping], path: str | None) -> None:
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


def _has_room(connection: Connection, request: DispatchRequest, spec: RunSpec, path: str | None) -> bool:
    """Whether the run is below its bound of snapshots in flight, or this one is among them already."""
    is_open = (points.c.run == request.run) & points.c.state.in_(_OPEN_STATES)
    # A reservation stands for the snapshot that is still to come; suites that share one count once.
    of_each = func.count(func.distinct(func.coalesce(points.c.snapshot_id, points.c.reservation)))
    if connection.execute(select(of_each).where(is_open)).scalar_one() < spec.max_in_flight:
        return True
    if path is None:
        return False
    query = select(points.c.id).join(snapshots, snapshots.c.id == points.c.snapshot_id)
    same = (snapshots.c.step == request.step) & (snapshots.c.path == path)
    return connection.execute(query.where(is_open, same).limit(1)).first() is not None


def _give_way(connection: Connection, run: str, now: float) -> bool:
    """Let the oldest snapshot that only waits and is not forced give way to a later one, with all its points."""
    is_open = (points.c.run == run) & points.c.state.in_(_OPEN_STATES)
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
