"""Figures of a measured run and whether they are what is to be reached: pure, from logs and views as plain JSON."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SETTLING_STEPS = 10  # the first ones allocate and compile
MAX_RATIO = 1.02  # of the mean step, evaluated to alone
MIN_STEPS, MIN_EXPORTS = 100, 4
MIN_SPEED = 0.9  # of the fleet, to one engine x N
SAME_LOSS = 0.01  # relative, over the first steps: bfloat16 on other numbers of ranks
TIMINGS = ("stall_s", "export_s", "canary_s", "queue_s", "pin_s", "generate_s", "score_s")
Log = Sequence[Mapping[str, Any]]


def step_figures(log: Log) -> dict[str, Any]:
    """From the trainer's step log: seconds from one step's begin to the next one's, an export between them included."""
    begun = [(entry["step"], entry["time"]) for entry in log if entry["event"] == "step_begin"][SETTLING_STEPS:]
    gaps = {step: later - at for (step, at), (_, later) in itertools.pairwise(begun)}
    staged = {entry["step"] for entry in log if entry["event"] == "eval_staged"}
    exporting = {step: gap for step, gap in gaps.items() if step in staged}
    at = {entry["event"]: entry["time"] for entry in log}
    losses = {entry["step"]: entry["loss"] for entry in log if entry["event"] == "step_end"}
    first = log[0]["time"] if log else 0.0
    told = ("start", "eval_staged", "eval_exported", "save", "saved", "drain_begin", "drain_end", "teardown")
    return {
        "steps": len(gaps),
        "exports": len(exporting),
        "step_s_mean": statistics.fmean(gaps.values()) if gaps else None,
        "step_s_median": statistics.median(gaps.values()) if gaps else None,
        "step_s": [round(gap, 4) for gap in gaps.values()],
        "first_step_at_s": next((e["time"] - first for e in log if e["event"] == "step_begin"), None),
        "at_s": [[e["event"], e.get("step"), round(e["time"] - first, 2)] for e in log if e["event"] in told],
        "slowest_exporting_step_s": max(exporting.values(), default=None),
        "exporting_step_s_mean": statistics.fmean(exporting.values()) if exporting else None,
        "drain_s": at["drain_end"] - at["drain_begin"] if {"drain_end", "drain_begin"} <= set(at) else None,
        "losses": [losses[step] for step in sorted(losses)][:20],
        "last_loss": losses[max(losses)] if losses else None,
        "events": dict(Counter(entry["event"] for entry in log)),
    }


def point_figures(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What became of the points of a run, and the mean, median and largest of each of their timings."""
    keys = (
        "step",
        "kind",
        "force",
        "state",
        "reason",
        "detail",
        "score",
        "stderr",
        "lag_steps",
        "pin_proof",
        "attempts",
    )
    lags = [point["lag_steps"] for point in points if point["lag_steps"] is not None]
    return {
        "points_by_state": dict(Counter(str(point["state"]) for point in points)),
        "timings": {name: _spread(point["timings"].get(name) for point in points) for name in TIMINGS},
        "lag_steps": _spread(lags),
        "proofs": dict(Counter(str(point["pin_proof"]) for point in points)),
        "points": [{key: point.get(key) for key in keys} | {"timings": point["timings"]} for point in points],
    }


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    found = [value for value in values if value is not None]
    if not found:
        return None
    return {"mean": statistics.fmean(found), "median": statistics.median(found), "max": max(found)}


def looks_figures(looks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """From looks at the fleet at a steady pace, `{engines: [{state, in_flight}], open_points}`: how busy it was.

    An engine is busy while it is pinned or has requests in flight; only the time counts in which it was ready.
    """
    there = [engine for look in looks for engine in look["engines"] if engine["state"] in ("ready", "pinning")]
    busy = [engine for engine in there if engine["state"] == "pinning" or engine["in_flight"]]
    return {
        "looks": len(looks),
        "busy_share": len(busy) / len(there) if there else None,
        "ready_engines_mean": len(there) / len(looks) if looks else None,
        "points_in_flight_max": max((look["open_points"] for look in looks), default=0),
        "looks_with_several_points": sum(look["open_points"] > 1 for look in looks),
    }


def speed_figures(one: float | None, fleet: float | None, engines: int) -> dict[str, Any]:
    """Tokens a second of one engine alone, of all at once, and what share of the sum they reach."""
    share = fleet / (engines * one) if one and fleet else None
    return {"one_engine": one, "fleet": fleet, "engines": engines, "share_of_one_times_n": share}


def loss_figures(one: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """How far two runs' losses are apart, step by step."""
    apart = [abs(a - b) / max(abs(a), 1e-9) for a, b in zip(one, other, strict=False)]
    return {"steps": len(apart), "max_relative": max(apart, default=None), "one": list(one), "other": list(other)}


def verdicts(found: Mapping[str, Any]) -> dict[str, bool]:
    """What is to be reached and could be judged from what was measured."""
    wanted: dict[str, bool] = {}
    for name in ("steps", "fleet"):
        if (part := found.get(name)) and part.get("step_ratio") is not None:
            enough = part["steps"] >= MIN_STEPS and part["exports"] >= MIN_EXPORTS
            wanted[f"{name}: enough steps and exports"] = enough
            if not found["plan"].get("shared"):  # two that compute on one GPU slow each other down
                wanted[f"{name}: mean step <= {MAX_RATIO} of training alone"] = part["step_ratio"] <= MAX_RATIO
    for name in ("points", "steps", "fleet"):
        if (part := found.get(name)) and "points_by_state" in part:
            wanted[f"{name}: every point done"] = part["points_by_state"] == {"done": part["expected_points"]}
            wanted[f"{name}: evalfleet check"] = part.get("check", {}).get("exit_code") == 0
            wanted[f"{name}: drained"] = bool((part.get("receipt") or {}).get("drained"))
    if speed := found.get("throughput"):
        wanted[f"tokens/s >= {MIN_SPEED} x N x one engine"] = (speed.get("share_of_one_times_n") or 0.0) >= MIN_SPEED
    if fleet := found.get("fleet"):
        happened = {event["what"] for event in fleet.get("happened", ())}
        if found["plan"]["engines"] > 1:
            all_of_it = {"killed", "scaled down", "scaled up"}
            wanted["an engine killed, the fleet scaled down and up"] = all_of_it <= happened
        else:  # one engine alone can't be scaled down while points run
            wanted["the engine killed, and back"] = {"killed", "the killed engine is back"} <= happened
        wanted["several points in flight"] = (fleet.get("looks") or {}).get("points_in_flight_max", 0) > 1
    for buffer, torn in (found.get("torn") or {}).items():
        equal = torn["equal"]
        compared = torn["exit_code"] == 0 and len(equal) == torn["planned"] == torn["different_weights"]
        wanted[f"no export from the {buffer}'s buffer torn"] = compared and all(equal.values())
    if tensor := found.get("tp"):
        wanted["export of untrained weights equal bit by bit"] = bool(tensor.get("untrained_equal"))
        wanted["losses as on one GPU"] = tensor.get("losses_apart", 1.0) <= SAME_LOSS
        wanted["export after training close"] = bool(tensor.get("trained_close"))
    return wanted
