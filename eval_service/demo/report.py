"""What the demo found: the report as data, its own assertions, and the tables for the terminal."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from eval_service.cli.output import columns, plus_minus
from eval_service.cli.reading import samples_text
from eval_service.contract.states import ENDS, PointState
from eval_service.contract.wire import EngineView, PointView, Receipt, SampleView
from eval_service.demo.plan import Plan

PACKAGES = ("evalfleet", "sglang", "ray", "torch", "megatron-core", "transformers")
SAMPLES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that the demo promises."""

    name: str
    ok: bool
    saw: str


@dataclass(frozen=True, slots=True)
class Findings:
    """All that was seen while the service still ran, and after everything had ended."""

    points: Sequence[PointView]
    first_samples: Sequence[SampleView]
    last_samples: Sequence[SampleView]
    receipt: Receipt | None
    trained_until: float | None
    kill: Mapping[str, Any] | None
    kill_wanted: bool
    disjoint: int
    engines: Sequence[EngineView]
    kept: Sequence[str]
    left_behind: Sequence[str]
    timings: Mapping[str, float]

    @property
    def overlap(self) -> int:
        """How many points ended before training did."""
        until = self.trained_until
        ends = [point.ended_at for point in self.points if point.state is PointState.DONE]
        return sum(until is not None and end is not None and end < until for end in ends)


def checks(found: Findings, plan: Plan) -> list[Check]:
    """What must be true for the demo to have gone as it should."""
    done = [point for point in found.points if point.state is PointState.DONE]
    first = next((point.score for point in done if point.step == 0), None)
    last = next((point.score for point in done if point.step == plan.num_steps), None)
    receipt = found.receipt
    result = [
        Check(
            f"at least {plan.min_points} points, all done",
            len(done) == len(found.points) >= plan.min_points,
            f"{len(done)} of {len(found.points)} done",
        ),
        Check(
            "a point at every planned step",
            tuple(point.step for point in done) == plan.steps,
            ", ".join(str(point.step) for point in done),
        ),
        Check(f"step 0 scores <= {plan.first_at_most}", first is not None and first <= plan.first_at_most, str(first)),
        Check(f"the end scores >= {plan.last_at_least}", last is not None and last >= plan.last_at_least, str(last)),
        Check(f"overlap >= {plan.min_overlap}", found.overlap >= plan.min_overlap, str(found.overlap)),
        Check("no eval prompt is trained on", found.disjoint > 0, f"{found.disjoint} looked up, none found"),
        Check("drained", receipt is not None and receipt.drained, "drained" if receipt and receipt.drained else "not"),
        Check("nothing is left behind", not found.left_behind, "; ".join(found.left_behind) or "nothing"),
    ]
    return result + ([_kill_check(found.kill)] if found.kill_wanted else [])


def report(found: Findings, plan: Plan, checked: Sequence[Check]) -> dict[str, Any]:
    """The content of report.json."""
    return {
        "ok": all(check.ok for check in checked),
        "checks": [{"name": check.name, "ok": check.ok, "saw": check.saw} for check in checked],
        "points": [_point(point) for point in found.points],
        "overlap": found.overlap,
        "drain": found.receipt.model_dump(mode="json") if found.receipt else None,
        "kill": dict(found.kill) if found.kill else None,
        "disjoint_prompts": found.disjoint,
        "engines": [{"id": e.id, "state": e.state.value, "restarts": e.restarts} for e in found.engines],
        "snapshots_kept": list(found.kept),
        "left_behind": list(found.left_behind),
        "timings": {name: round(seconds, 3) for name, seconds in found.timings.items()},
        "plan": {"steps": list(plan.steps), "num_steps": plan.num_steps, "eval_examples": plan.eval_examples},
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """What ran."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def curve_text(points: Sequence[PointView]) -> str:
    """The curve as a table."""
    rows = [
        [
            p.step,
            p.state.value,
            plus_minus(p.score, p.stderr),
            p.lag_steps,
            p.timings.stall_s,
            p.timings.export_s,
            p.timings.pin_s,
            p.timings.generate_s,
            p.timings.queue_s,
            p.attempts,
        ]
        for p in points
    ]
    return columns("step state score lag_steps stall_s export_s pin_s generate_s queue_s attempts", rows)


def closing_text(found: Findings, checked: Sequence[Check]) -> str:
    """What is printed at the end."""
    parts = [curve_text(found.points)]
    if found.points:
        for point, samples in ((found.points[0], found.first_samples), (found.points[-1], found.last_samples)):
            parts.append(f"step {point.step}:\n{samples_text(list(samples))}")
    parts.append(f"{found.overlap} of {len(found.points)} points ended before training did")
    parts.append("\n".join(f"{'ok    ' if check.ok else 'FAILED'}  {check.name} ({check.saw})" for check in checked))
    return "\n\n".join(parts)


def some(samples: Sequence[SampleView]) -> list[SampleView]:
    """Three samples to show, of different datasets where there are as many."""
    by_dataset: dict[str, SampleView] = {}
    for sample in samples:
        by_dataset.setdefault(sample.dataset, sample)
    chosen = list(by_dataset.values())[:SAMPLES_SHOWN]
    return chosen + [sample for sample in samples if sample not in chosen][: SAMPLES_SHOWN - len(chosen)]


def _kill_check(kill: Mapping[str, Any] | None) -> Check:
    name = "an engine was killed and nothing was lost"
    if kill is None:
        return Check(name, False, "no engine was busy at a time when it could be killed")
    whole = kill["samples"] == kill["samples_expected"] and kill["samples_with_error"] == 0
    pinned = kill["weight_versions"] == [kill["weight_version_pinned"]]
    in_time = kill["point_state_after"] not in {end.value for end in ENDS}
    taken_over = kill["point_state"] == PointState.DONE and kill["samples_from_others"] > 0
    ok = in_time and taken_over and whole and pinned
    return Check(name, ok, _kill_text(kill))


def _kill_text(kill: Mapping[str, Any]) -> str:
    return (
        f"engine {kill['engine']} was killed with {kill['in_flight']} requests of step {kill['step']} in flight; the "
        f"point is {kill['point_state']} with {kill['samples']} of {kill['samples_expected']} samples, "
        f"{kill['samples_from_others']} from other engines, {kill['attempts']} attempt(s)"
    )


def _point(point: PointView) -> dict[str, Any]:
    times = point.timings
    return {
        "step": point.step,
        "suite": point.suite,
        "kind": point.kind.value,
        "state": point.state.value,
        "reason": point.reason.value if point.reason else None,
        "score": point.score,
        "stderr": point.stderr,
        "lag_steps": point.lag_steps,
        "stall_s": times.stall_s,
        "export_s": times.export_s,
        "pin_s": times.pin_s,
        "generate_s": times.generate_s,
        "queue_s": times.queue_s,
        "attempts": point.attempts,
        "pin_proof": point.pin_proof.value if point.pin_proof else None,
        "ended_at": point.ended_at,
        "metrics": {name: metric.model_dump(mode="json") for name, metric in point.metrics.items()},
    }
