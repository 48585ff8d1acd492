"""A ledger that a service has kept for long: 10,000 points of 100 runs, written straight into its tables."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import insert

from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import RunSpec
from eval_service.ledger.database import Database
from eval_service.ledger.schema import attempts, points, runs, snapshots

SUITE = "main"
KEPT = 2  # snapshots of a run that still lie on storage
_DAY_S = 86_400.0
# One step in twenty has no result, as in a long run on a busy fleet.
_WITHOUT_RESULT = {
    7: (PointState.SKIPPED, Reason.BUSY),
    27: (PointState.FAILED, Reason.PIN_VIOLATION),
    47: (PointState.SKIPPED, Reason.EXPORT_FAILED),
    67: (PointState.CANCELLED, Reason.USER),
    87: (PointState.SKIPPED, Reason.BUSY),
}


@dataclass(frozen=True, slots=True)
class Stock:
    """How much there is."""

    runs: int = 100
    steps: int = 100
    manifest_bytes: int = 4000  # that each snapshot's row carries

    @property
    def names(self) -> list[str]:
        """The runs' names."""
        return [f"run-{number:03d}" for number in range(self.runs)]

    def write(self, url: str, root: Path) -> int:
        """Fill a ledger; returns how many points it has."""
        database = Database(url)
        now = time.time()
        rows: dict[Any, list[dict[str, Any]]] = {runs: [], snapshots: [], points: [], attempts: []}
        for number, run in enumerate(self.names):
            (root / run).mkdir(parents=True)
            spec = RunSpec(root=str(root), suites=(SUITE,), max_in_flight=100_000, keep=KEPT)
            rows[runs].append(_run(run, spec, now))
            for step in range(self.steps):
                for table, row in _step(run, step, number * self.steps + step + 1, self, root, now):
                    rows[table].append(row)
        with database.writing() as connection:
            for table, of_it in rows.items():
                connection.execute(insert(table), of_it)
        database.close()
        return len(rows[points])


def _run(run: str, spec: RunSpec, now: float) -> dict[str, Any]:
    row = {"run": run, "spec": spec.model_dump_json(), "state": "active", "paused": False}
    return row | {"created_at": now - _DAY_S}


def _step(run: str, step: int, seq: int, stock: Stock, root: Path, now: float) -> Iterator[tuple[Any, dict[str, Any]]]:
    state, reason = _WITHOUT_RESULT.get(step, (PointState.DONE, None))
    ended_at = now - _DAY_S + step * _DAY_S / (stock.steps + 1)
    snapshot = uuid.uuid4().hex
    kept = step >= stock.steps - KEPT
    yield snapshots, _snapshot(snapshot, run, step, root, ended_at, kept=kept, padding=stock.manifest_bytes)
    point = _point(run, step, seq, ended_at) | {"snapshot_id": snapshot, "state": state, "reason": reason}
    if state is PointState.DONE:
        metric = {"value": 0.5, "stderr": 0.1, "n": 64}
        point |= {"score": 0.5, "stderr": 0.1, "metrics": json.dumps({"main/exact": metric}), "pin_proof": "canary"}
        times = {"epoch": 0, "started_at": ended_at - 20, "ended_at": ended_at, "outcome": "done"}
        yield points, point
        yield attempts, times | {"point": point["id"], "number": 1, "engines": '["eval-a", "eval-b"]'}
    else:
        yield points, point | {"score": None, "stderr": None, "metrics": "{}", "pin_proof": None}


def _snapshot(id_: str, run: str, step: int, root: Path, at: float, *, kept: bool, padding: int) -> dict[str, Any]:
    digest = uuid.uuid4().hex
    row = {"id": id_, "run": run, "step": step, "path": str(root / run / f"step_{step}-{digest[:8]}")}
    row |= {"source": "staging", "claimed_digest": digest, "digest": digest, "tensor_digest": digest}
    row |= {"nonce": uuid.uuid4().hex, "manifest": json.dumps({"padding": "x" * padding}), "vocab_size": 128}
    row |= {"admitted_at": at - 30, "created_at": at - 40, "settled_at": at, "held": False}
    return row | {"deleting_at": None if kept else at, "deleted_at": None if kept else at}


def _point(run: str, step: int, seq: int, ended_at: float) -> dict[str, Any]:
    row = {"id": uuid.uuid4().hex, "seq": seq, "run": run, "step": step, "suite": SUITE, "kind": "periodic"}
    row |= {"reservation": str(uuid.uuid4()), "force": False, "source": "staging", "superseded": False, "attempts": 1}
    row |= {"faults": 0, "lag_steps": 1, "timings": json.dumps({"pin_s": 1.0, "duration_s": 25.0})}
    return row | {
        "created_at": ended_at - 60,
        "queued_at": ended_at - 40,
        "started_at": ended_at - 20,
        "ended_at": ended_at,
    }
