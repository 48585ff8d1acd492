"""Builders of wire views with sensible defaults, for tests that care about a few fields."""

from __future__ import annotations

from typing import Any

from eval_service.contract.states import PinProof, PointState
from eval_service.contract.wire import (
    EngineState,
    EngineView,
    Kind,
    Metric,
    PointView,
    Receipt,
    SampleView,
    Source,
    Timings,
)


def point(step: int, score: float | None = None, **changes: Any) -> PointView:
    """A point of suite `letters`, done if it has a score, else queued."""
    values: dict[str, Any] = {
        "id": f"p{step}-{changes.get('suite', 'letters')}",
        "run": "demo",
        "step": step,
        "suite": "letters",
        "kind": Kind.PERIODIC,
        "force": False,
        "priority": 0,
        "reservation": "0" * 32,
        "state": PointState.QUEUED if score is None else PointState.DONE,
        "reason": None,
        "detail": None,
        "superseded": False,
        "source": Source.STAGING,
        "snapshot": f"/snapshots/demo/step_{step}",
        "digest": "0" * 32,
        "weight_version": "00000000.1",
        "pin_proof": PinProof.CANARY,
        "attempts": 1,
        "score": score,
        "stderr": None if score is None else 0.02,
        "metrics": {} if score is None else {"exact_match": Metric(value=score, stderr=0.02, n=100)},
        "lag_steps": 7,
        "timings": Timings(stall_s=0.1, export_s=0.2, queue_s=0.3, pin_s=0.4, generate_s=0.5),
        "created_at": 1000.0,
        "queued_at": 1000.0,
        "started_at": 1001.0,
        "ended_at": None if score is None else 1002.0 + step,
        "samples_path": None,
    }
    return PointView(**(values | changes))


def sample(index: int, score: float = 1.0, **changes: Any) -> SampleView:
    """A sample: right at score 1."""
    values: dict[str, Any] = {
        "index": index,
        "prompt_index": index,
        "dataset": "sort",
        "prompt": f"sort {index}",
        "answer": "abc",
        "output": "abc" if score else "cba",
        "score": score,
        "error": None,
        "finish_reason": "stop",
        "prompt_tokens": 5,
        "output_tokens": 3,
        "engine": "eval-1",
        "weight_version": "00000000.1",
        "latency_s": 0.1,
    }
    return SampleView(**(values | changes))


def engine(name: str, **changes: Any) -> EngineView:
    """An idle, ready engine."""
    values: dict[str, Any] = {
        "id": name,
        "group": "eval",
        "state": EngineState.READY,
        "detail": None,
        "url": "http://127.0.0.1:30000",
        "node": "node-1",
        "nonce": "n1",
        "server_pid": 4242,
        "supervisor_pid": 4241,
        "replica_pid": 4240,
        "snapshot": None,
        "weight_version": None,
        "point": None,
        "in_flight": 0,
        "restarts": 0,
        "heard_at": 1000.0,
    }
    return EngineView(**(values | changes))


def receipt(**changes: Any) -> Receipt:
    """A receipt of a finished drain."""
    values: dict[str, Any] = {
        "drain": "0" * 32,
        "run": "demo",
        "open": False,
        "drained": True,
        "started_at": 1000.0,
        "ended_at": 1010.0,
        "deadline": 1600.0,
    }
    return Receipt(**(values | changes))
