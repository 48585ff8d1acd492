"""What the acting controller writes: it alone moves points, every move by the table, every write under its epoch."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from sqlalchemy import ColumnElement, RowMapping, Select, and_, delete, exists, func, insert, or_, select, update

from eval_service.contract.manifest import Manifest
from eval_service.contract.results import Alarm, Direction, Metric
from eval_service.contract.states import PinProof, PointState, Reason
from eval_service.contract.wire import FleetView
from eval_service.ledger import carrying, watching
from eval_service.ledger.changes import Changes
from eval_service.ledger.database import CONTROLLER_AT, FLEET, Database, put
from eval_service.ledger.events import fleet_changed
from eval_service.ledger.receipts import end_drains, to_end
from eval_service.ledger.rows import carry_out, sound
from eval_service.ledger.schema import attempts, drains, links, points, runs, servings, snapshots
from eval_service.ledger.turn import END_STATES, LIVE_STATES, OPEN_STATES, Turn, turn


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
    unheld: str | None = None  # why hard links do not keep it, where they should


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
    root: str  # of its run
    links: str | None  # where hard links to it are, or should be
    why_not: str | None


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
    headline: str | None = None
    direction: Direction = Direction.MAX
    suite_digest: str | None = None
    alarms: tuple[Alarm, ...] = ()  # those that need no other point


class Moves:
    """The controller's side of the ledger, under one epoch."""

    def __init__(self, database: Database, epoch: int, *, max_attempts: int) -> None:
        self._db = database
        self.epoch = epoch
        self._max_attempts = max_attempts
        self._changes = Changes(database)
        self._told: FleetView | None = None  # what the last event of the fleet left off with

    # --- intents

    def recover(self) -> int:
        """Queue again what a former controller had in its hands; that is no fault of the point's."""
        with self._turn() as turn:
            query = select(points.c.id).where(points.c.state.in_(LIVE_STATES)).order_by(points.c.seq)

            def again(point: str) -> None:
                turn.end_attempt(point, "controller_lost", None)
                turn.move(point, PointState.QUEUED)

            return carry_out(turn.connection, turn.connection.execute(query).scalars().all(), again)

    def take_intents(self, *, reservation_timeout_s: float) -> int:
        """Carry out what gateways wrote: arrivals, commands, deletions, unused reservations. Returns how many."""
        with self._db.looking(self.epoch) as connection:  # most looks find nothing
            if not carrying.is_asked(connection, self._db.clock(), reservation_timeout_s):
                return 0
        with self._turn() as turn:
            done = carrying.take_arrivals(turn)
            done += carrying.take_commands(turn)
            done += carrying.end_deleted_runs(turn)
            done += carrying.expire_reservations(turn, reservation_timeout_s)
            return done

    def show_life(self, fleet: FleetView) -> None:
        """Write the controller's sign of life, the fleet as it sees it, and what the router's gates hold."""
        before = self._told or self._last_fleet()
        now = self._db.clock()
        with self._changes.writing() as connection:
            self._db.fence(connection, self.epoch)
            put(connection, CONTROLLER_AT, str(self.epoch), now)
            put(connection, FLEET, fleet.model_dump_json(), now)
            fleet_changed(connection, before, fleet, now)
        self._told = fleet

    def close(self) -> None:
        """Give up the connection that signs of life are written over."""
        self._changes.close()

    def changes(self) -> int:
        """A number that differs from the last one if the ledger was written to, but for signs of life."""
        return self._changes()

    def time_matters(self) -> bool:
        """Whether a point, a drain or a serving is open, which time alone may end."""
        still_open = (points.c.state.in_(OPEN_STATES), drains.c.ended_at.is_(None), servings.c.closed_at.is_(None))
        with self._db.reading() as connection:
            return bool(connection.execute(select(or_(*(exists().where(one) for one in still_open)))).scalar_one())

    def _last_fleet(self) -> FleetView:
        """As a former controller left it."""
        found = self._db.read_meta(FLEET)
        with suppress(ValidationError):  # another version may have written it
            if found is not None:
                return FleetView.model_validate_json(found[0])
        return FleetView(groups=(), seen_at=None)

    def tend_drains(self) -> int:
        """Cancel what overdue drains want cancelled, and write receipts of those that are over; returns how many."""
        now = self._db.clock()
        with self._db.looking(self.epoch) as connection:  # most looks find nothing
            if not carrying.overdue_drains(connection, now) and not to_end(connection, now):
                return 0
        with self._turn() as turn:
            return carrying.abort_overdue_drains(turn) + end_drains(turn.connection, turn.now)

    # --- admission

    def unadmitted(self) -> list[Unadmitted]:
        """Snapshots that queued points wait for, or people to whom an ended point is to be served."""
        since = func.coalesce(servings.c.asked_at, points.c.queued_at).label("queued_at")
        query = (
            select(snapshots, since, points.c.seq, runs.c.spec, links.c.path.label("links"), links.c.why_not)
            .join(points, points.c.snapshot_id == snapshots.c.id)
            .join(runs, runs.c.run == snapshots.c.run)
            .outerjoin(links, links.c.snapshot == snapshots.c.id)
            .outerjoin(servings, servings.c.point == points.c.id)
            .where(snapshots.c.admitted_at.is_(None))
        )
        found: list[RowMapping] = []
        with self._db.reading() as connection:
            for wanted in (points.c.state == PointState.QUEUED, is_open(self._db.clock())):  # with `or` all are read
                found += connection.execute(query.where(wanted)).mappings()
        rows = sorted(found, key=lambda row: int(row["seq"]))
        first = {row["id"]: row for row in reversed(rows)}
        return list(sound((first[id_] for id_ in dict.fromkeys(row["id"] for row in rows)), _unadmitted))

    def note_links(self, snapshot: str, path: str, why_not: str | None = None) -> None:
        """Write where hard links to a snapshot are to be, before they are made; or why they can't be."""
        with self._db.acting(self.epoch) as connection:
            values = {"path": path, "why_not": why_not}
            if connection.execute(update(links).where(links.c.snapshot == snapshot).values(**values)).rowcount == 0:
                connection.execute(insert(links).values(snapshot=snapshot, **values))

    def forget_links(self, snapshot: str) -> None:
        """No hard links to a snapshot were made."""
        with self._db.acting(self.epoch) as connection:
            connection.execute(delete(links).where(links.c.snapshot == snapshot))

    def admit(self, snapshot: str, facts: Facts) -> None:
        """The checks passed: keep what they found, and let newer points supersede older ones."""
        with self._turn() as turn:
            known = {"vocab_size": facts.vocab_size, "admitted_at": turn.now}
            before = turn.connection.execute(select(snapshots.c.digest).where(snapshots.c.id == snapshot)).scalar_one()
            if before not in (None, facts.manifest.digest):
                _close_servings(turn, snapshot)  # it is no longer what the point was evaluated on
            _describe(turn, snapshot, facts.manifest, **known)
            for row in turn.points_on(snapshot, PointState.QUEUED):
                turn.supersede(row["id"], facts.manifest.digest)

    def refuse(self, snapshot: str, reason: Reason, detail: str, manifest: Manifest | None = None) -> None:
        """The checks failed: every point that waits for it is skipped.

        Args:
            manifest: if it could be read, kept all the same: GC deletes no export whose nonce the ledger lacks.
        """
        with self._turn() as turn:
            if manifest is not None:
                _describe(turn, snapshot, manifest)
            _close_servings(turn, snapshot)
            for row in turn.points_on(snapshot, PointState.QUEUED):
                turn.end(row["id"], PointState.SKIPPED, reason, detail)

    # --- points

    def runnable(self) -> list[Runnable]:
        """Queued points whose snapshots are admitted and whose runs go on, in the order they were asked for."""
        query = (
            runnables()
            .where(points.c.state == PointState.QUEUED, snapshots.c.admitted_at.is_not(None))
            .where(runs.c.paused.is_(False), runs.c.deleted_at.is_(None))
            .order_by(points.c.seq)
        )
        with self._db.reading() as connection:
            rows = connection.execute(query).mappings().all()
        return list(sound(rows, runnable_of))

    def manifest(self, snapshot: str) -> Manifest:
        """An admitted snapshot's manifest."""
        with self._db.reading() as connection:
            text = connection.execute(select(snapshots.c.manifest).where(snapshots.c.id == snapshot)).scalar_one()
        return Manifest.model_validate_json(text)

    def begin_attempt(self, point: str) -> int | None:
        """`queued -> pinning`; returns the attempt's number, None where the point is no longer queued."""
        with self._turn() as turn:
            row = turn.point(point)
            if row["state"] != PointState.QUEUED:
                return None
            number = row["attempts"] + 1
            turn.move(point, PointState.PINNING, attempts=number, started_at=turn.now)
            attempt = {"point": point, "number": number, "epoch": self.epoch, "started_at": turn.now, "engines": "[]"}
            turn.connection.execute(insert(attempts).values(**attempt))
            return int(number)

    def advance(self, point: str, new: PointState) -> bool:
        """`pinning -> running -> scoring`; False where somebody ended the point meanwhile."""
        with self._turn() as turn:
            state = turn.point(point)["state"]
            if state not in LIVE_STATES:
                return False
            if state != new:  # it is so already where the answer to the commit was lost
                turn.move(point, new)
            return True

    def finish(self, point: str, result: Result) -> bool:
        """`scoring -> done` with its result; False where somebody ended the point meanwhile."""
        with self._turn() as turn:
            row = turn.point(point)
            if row["state"] == PointState.DONE and row["samples_path"] == result.samples_path:
                return True  # the answer to the commit was lost
            if row["state"] != PointState.SCORING:
                return False
            turn.end_attempt(point, "done", None, result.engines)
            turn.move(point, PointState.DONE, **_columns(result, row, turn.now))
            watching.look_around(turn.connection, turn.point(point), turn.now)
            return True

    def end(self, point: str, state: PointState, reason: Reason, detail: str) -> bool:
        """End a point without a result; False where it has ended already."""
        with self._turn() as turn:
            if turn.point(point)["state"] in END_STATES:
                return False
            turn.end(point, state, reason, detail)
            return True

    def requeue(self, point: str, fault: str, detail: str, engines: Sequence[str] = ()) -> PointState:
        """An infrastructure fault: back to `queued`, until `max_attempts`. Returns the state it is in now."""
        with self._turn() as turn:
            row = turn.point(point)
            if row["state"] not in LIVE_STATES:
                return PointState(row["state"])
            faults, why = row["faults"] + 1, f"{fault}: {detail}"
            turn.end_attempt(point, fault, detail, engines)
            if faults >= self._max_attempts:
                turn.end(point, PointState.FAILED, Reason.MAX_ATTEMPTS, why, faults=faults)
                return PointState.FAILED
            turn.move(point, PointState.QUEUED, faults=faults, detail=why)
            return PointState.QUEUED

    def overtaken(self, lanes: Collection[str]) -> list[str]:
        """Those of the points with a lane that somebody else ended, or queued anew, meanwhile."""
        query = select(points.c.id).where(points.c.id.in_(lanes), points.c.state.not_in(LIVE_STATES))
        with self._db.reading() as connection:
            return list(connection.execute(query).scalars())

    def strays(self, lanes: Collection[str]) -> list[str]:
        """Live points that have no lane: its end could not be written, or its begin did not come through."""
        query = select(points.c.id).where(points.c.state.in_(LIVE_STATES), points.c.id.not_in(lanes))
        with self._db.reading() as connection:
            return list(connection.execute(query).scalars())

    def overdue(self, point_timeout_s: float) -> list[str]:
        """Points that have been queued or tried for longer than a point may take; a pause of their run stops time."""
        waiting = points.c.state.in_((PointState.QUEUED.value, *LIVE_STATES))
        since = func.coalesce(runs.c.resumed_at, 0.0)
        late = self._db.clock() - point_timeout_s
        query = select(points.c.id).join(runs, runs.c.run == points.c.run)
        query = query.where(waiting, points.c.queued_at < late, since < late)
        running = points.c.state.in_(LIVE_STATES)
        with self._db.reading() as connection:
            return list(connection.execute(query.where(running | runs.c.paused.is_(False))).scalars())

    def end_unserved(self, point: str, detail: str) -> None:
        """A queued point's time is up: it was tried (`failed: deadline`), or no engine came (`skipped: unhealthy`)."""
        with self._turn() as turn:
            row = turn.point(point)
            admitted = select(snapshots.c.admitted_at).where(snapshots.c.id == row["snapshot_id"])
            if row["state"] == PointState.QUEUED and row["attempts"]:
                turn.end(point, PointState.FAILED, Reason.DEADLINE, detail)
            elif row["state"] == PointState.QUEUED and turn.connection.execute(admitted).scalar() is None:
                why = "its snapshot could not be checked, which is so where its storage does not answer"
                turn.end(point, PointState.SKIPPED, Reason.CKPT_MISSING, f"{why}: {detail}")
            elif row["state"] == PointState.QUEUED:
                turn.end(point, PointState.SKIPPED, Reason.UNHEALTHY, f"no engine came: {detail}")

    def state(self, point: str) -> PointState:
        """A point's state now."""
        with self._db.reading() as connection:
            return PointState(connection.execute(select(points.c.state).where(points.c.id == point)).scalar_one())

    def _turn(self) -> AbstractContextManager[Turn]:
        return turn(self._db, self.epoch)


def _describe(turn: Turn, snapshot: str, manifest: Manifest, **values: Any) -> None:
    """Keep what is known of a snapshot's content and of the export that wrote it."""
    values |= {"digest": manifest.digest, "tensor_digest": manifest.tensor_digest, "nonce": manifest.nonce}
    values |= {"manifest": manifest.model_dump_json()}
    turn.connection.execute(update(snapshots).where(snapshots.c.id == snapshot).values(**values))


def _columns(result: Result, row: RowMapping, now: float) -> dict[str, Any]:
    timings = json.loads(row["timings"]) | result.timings
    timings |= {"queue_s": row["started_at"] - row["queued_at"], "duration_s": now - row["queued_at"]}
    return {
        "detail": None,
        "metrics": json.dumps({name: metric.model_dump() for name, metric in result.metrics.items()}),
        "score": result.score,
        "stderr": result.stderr,
        "samples_path": result.samples_path,
        "weight_version": result.weight_version,
        "pin_proof": result.pin_proof,
        "timings": json.dumps(timings),
        "headline": result.headline,
        "direction": result.direction,
        "suite_digest": result.suite_digest,
        "alarms": watching.to_text(result.alarms),
    }


def is_open(now: float) -> ColumnElement[bool]:
    """Of points with their servings: whether one is to be served."""
    # Not `in_(END_STATES)`: by that SQLite looks at every point that has ended before it looks at the servings.
    ended = points.c.state.not_in(OPEN_STATES)
    return and_(servings.c.closed_at.is_(None), servings.c.until > now, ended)


def _close_servings(turn: Turn, snapshot: str) -> None:
    of_it = select(points.c.id).where(points.c.snapshot_id == snapshot)
    turn.connection.execute(update(servings).where(servings.c.point.in_(of_it)).values(closed_at=turn.now))


def _unadmitted(row: RowMapping) -> Unadmitted:
    columns = ("id", "run", "step", "path", "source", "claimed_digest", "queued_at", "links", "why_not")
    return Unadmitted(**{name: row[name] for name in columns}, root=json.loads(row["spec"])["root"])


def runnables() -> Select[Any]:
    """Points with what `runnable_of` needs of their snapshots and runs."""
    return (
        select(points, snapshots.c.path, snapshots.c.digest, snapshots.c.tensor_digest, snapshots.c.vocab_size)
        .add_columns(runs.c.spec, links.c.path.label("links"), links.c.why_not)
        .outerjoin(links, links.c.snapshot == points.c.snapshot_id)
        .join(snapshots, snapshots.c.id == points.c.snapshot_id)
        .join(runs, runs.c.run == points.c.run)
    )


def runnable_of(row: RowMapping) -> Runnable:
    """A row of `runnables`."""
    spec = json.loads(row["spec"])
    names = ("id", "seq", "run", "step", "suite", "force", "attempts", "queued_at", "snapshot_id")
    return Runnable(
        **{name: row[name] for name in names},
        priority=spec["priority"] if row["priority"] is None else row["priority"],
        max_engines=spec["max_engines"],
        root=spec["root"],
        snapshot=row["path"] if row["links"] is None or row["why_not"] is not None else row["links"],
        unheld=row["why_not"],
        digest=row["digest"],
        tensor_digest=row["tensor_digest"],
        vocab_size=row["vocab_size"],
    )
