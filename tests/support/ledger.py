"""A ledger on a disk of its own with a clock that a test turns, seen from all its sides."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import event, select

from eval_service.contract.manifest import FileEntry, Manifest
from eval_service.contract.states import LIVE, PinProof, PointState, Reason
from eval_service.contract.wire import DispatchReply, DispatchRequest, Metric, PointView, RunSpec
from eval_service.ledger.bounds import Bounds
from eval_service.ledger.database import Database
from eval_service.ledger.intents import Intents
from eval_service.ledger.moves import Facts, Moves, Result
from eval_service.ledger.orders import Orders
from eval_service.ledger.retention import Retention
from eval_service.ledger.schema import snapshots
from eval_service.ledger.views import Views

SUITES = ("main", "extra", "third")
EXPIRY_S = 100.0
MAX_ATTEMPTS = 3
_WAY = (PointState.PINNING, PointState.RUNNING, PointState.SCORING)


@dataclass
class Clock:
    """Unix seconds that pass when the test says so."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def turn(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@dataclass
class Ledger:
    """The gateway's and the controller's side of one database. The run `r1` is known."""

    base: Path
    url: str | None = None  # None: SQLite
    clock: Clock = field(default_factory=Clock)
    db: Database = field(init=False)
    moves: Moves = field(init=False)

    def __post_init__(self) -> None:
        self.db = Database(self.url or f"sqlite:///{self.base / 'ledger.db'}", clock=self.clock)
        if self.db.engine.dialect.name == "sqlite":
            # No power cut comes to a test; waiting for the disk is most of what it would do.
            event.listen(self.db.engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=OFF"))
            self.db.engine.dispose()
        self.root = self.base / "root"
        self.root.mkdir()
        self.bounds = Bounds((self.root,), SUITES)
        self.intents = Intents(self.db, self.bounds)
        self.orders = Orders(self.db)
        self.views = Views(self.db, version="0")
        self.take_over()
        self.put_run()

    def take_over(self) -> Moves:
        """A new controller acts."""
        self.moves = Moves(self.db, self.db.take_epoch(), max_attempts=MAX_ATTEMPTS)
        self.retention = Retention(self.db, self.moves.epoch)
        return self.moves

    def put_run(self, run: str = "r1", **changes: Any) -> None:
        """Make a run known, or change it."""
        spec = {"root": str(self.root), "suites": ("main",), "max_in_flight": 2} | changes
        self.intents.put_run(run, RunSpec.model_validate(spec))

    # --- a trainer

    def reserve(self, step: int, run: str = "r1", **changes: Any) -> DispatchReply:
        """Reserve under a new uuid, asking for a final answer."""
        values = {"run": run, "step": step, "reservation": str(uuid.uuid4()), "wait_s": 0} | changes
        return self.intents.dispatch(DispatchRequest.model_validate(values))

    def path(self, step: int, digest: str = "a" * 32, run: str = "r1") -> Path:
        """A published snapshot's directory, made if it is not there."""
        directory = self.root / run / f"step_{step}-{digest[:8]}"
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def send(self, step: int, digest: str = "a" * 32, run: str = "r1", **changes: Any) -> DispatchReply:
        """Hand a snapshot over: under a new uuid and over the bound, unless told otherwise."""
        path = changes.pop("snapshot", None) or str(self.path(step, digest, run))
        values = {"snapshot": path, "digest": digest, "deferred": True} | changes
        return self.reserve(step, run, **values)

    # --- a controller

    def look(self) -> int:
        """What a controller's tick does first."""
        return self.moves.take_intents(reservation_timeout_s=EXPIRY_S) + self.moves.tend_drains()

    def manifest(self, step: int, digest: str = "a" * 32, run: str = "r1") -> Manifest:
        """As the checks would find it."""
        files = (FileEntry(name="config.json", size_bytes=2, xxh3_128=digest),)
        built = Manifest.build(run=run, step=step, files=files, tensors=(), exporter="tests", nonce=uuid.uuid4().hex)
        return built.model_copy(update={"digest": digest})

    def admit(self) -> None:
        """The checks of all that wait for them pass, with the digest that was claimed."""
        for snapshot in self.moves.unadmitted():
            manifest = self.manifest(snapshot.step, snapshot.claimed_digest or "c" * 32, snapshot.run)
            self.moves.admit(snapshot.id, Facts(manifest, vocab_size=32))

    def queued(self, step: int, digest: str = "a" * 32, run: str = "r1", **changes: Any) -> str:
        """A point that may run."""
        (ref,) = self.send(step, digest, run, **changes).points
        self.look()
        self.admit()
        return ref.id

    def live(self, state: PointState, step: int = 1, **changes: Any) -> str:
        """A point that is being tried."""
        point = self.queued(step, **changes)
        self.go(point, state)
        return point

    def go(self, point: str, state: PointState) -> None:
        """Take a queued point up to a live state, or to `done`."""
        assert self.moves.begin_attempt(point) is not None
        for passed in _WAY[1 : _WAY.index(state) + 1 if state in LIVE else None]:
            assert self.moves.advance(point, passed)
        if state is PointState.DONE:
            assert self.moves.finish(point, result())

    def done(self, step: int, digest: str = "a" * 32, score: float = 0.5, **changes: Any) -> str:
        """A point with a result."""
        point = self.queued(step, digest, **changes)
        self.go(point, PointState.SCORING)
        assert self.moves.finish(point, result(score=score))
        return point

    def reach(self, state: PointState, step: int = 1) -> str:
        """A point in any state."""
        if state is PointState.RESERVED:
            return self.reserve(step).points[0].id
        if state is PointState.QUEUED:
            return self.queued(step)
        if state in LIVE:
            return self.live(state, step)
        if state is PointState.DONE:
            return self.done(step)
        point = self.queued(step)
        assert self.moves.end(point, state, REASON_OF[state], "as the test wants it")
        return point

    # --- what is seen

    def point(self, point: str) -> PointView:
        """A point as anybody sees it."""
        return self.views.point(point)

    def state(self, point: str) -> PointState:
        """A point's state."""
        return self.views.point(point).state

    def states(self, run: str = "r1") -> list[tuple[int, str, PointState]]:
        """Every point of a run, superseded ones too."""
        return [(point.step, point.suite, point.state) for point in self.views.points(run=run).points]

    def snapshot(self, step: int, run: str = "r1") -> Any:
        """The row of a step's newest snapshot."""
        query = select(snapshots).where(snapshots.c.run == run, snapshots.c.step == step)
        with self.db.reading() as connection:
            return connection.execute(query.order_by(snapshots.c.created_at.desc())).mappings().first()


REASON_OF = {
    PointState.SKIPPED: Reason.UNHEALTHY,
    PointState.FAILED: Reason.DEADLINE,
    PointState.CANCELLED: Reason.USER,
}


def result(engines: Sequence[str] = ("e1",), **changes: Any) -> Result:
    """What a lane writes."""
    values: dict[str, Any] = {
        "metrics": {"exact": Metric(value=0.5, stderr=0.1, n=4)},
        "score": 0.5,
        "stderr": 0.1,
        "samples_path": "/nowhere/samples.parquet",
        "weight_version": "aaaaaaaa.1",
        "pin_proof": PinProof.CANARY,
        "engines": tuple(engines),
        "timings": {"pin_s": 1.0},
    }
    return Result(**(values | changes))
