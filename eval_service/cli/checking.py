"""`evalfleet check`: does a run's curve hold what it should? For CI, so every doubt is a failure.

`judge` is a pure function of the points; a superseded point never counts, whichever way it ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from eval_service.cli import options
from eval_service.cli.output import print_json, say
from eval_service.cli.reading import all_points, points_text
from eval_service.contract.results import Direction
from eval_service.contract.states import ENDS, PointState, Reason
from eval_service.contract.wire import PointView


class At(StrEnum):
    """Which points must have reached the threshold."""

    ANY = "any"
    FINAL = "final"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Demand:
    """What a run must show."""

    metric: str
    threshold: float
    expect_points: int
    direction: Direction = Direction.MAX
    at: At = At.FINAL

    def reached(self, value: float) -> bool:
        """Whether a value is good enough; NaN never is."""
        if math.isnan(value):
            return False
        return value >= self.threshold if self.direction is Direction.MAX else value <= self.threshold


def check(
    run: options.Run,
    metric: Annotated[str, typer.Option(help="A metric's name, such as exact_match; `score` is the headline.")],
    threshold: Annotated[float, typer.Option(help="What the metric must reach.")],
    expect_points: Annotated[int, typer.Option(min=1, help="How many points must be done, no more and no fewer.")],
    direction: Annotated[Direction, typer.Option(help="Whether more or less is better.")] = Direction.MAX,
    at: Annotated[At, typer.Option(help="Which points must reach it: one, those at the last step, or all.")] = At.FINAL,
    suite: Annotated[str | None, typer.Option(help="Only this suite's points.")] = None,
    url: options.Url = options.DEFAULT_URL,
    as_json: options.Json = False,
) -> None:
    """Exit 0 only when exactly N points are done, none ended otherwise, and the metric reached the threshold."""
    demand = Demand(metric, threshold, expect_points, direction, at)
    with options.connect(url) as client:
        points = all_points(client, run, suite)
    faults = judge(points, demand)
    if as_json:
        seen = [point.model_dump(mode="json") for point in points]
        print_json({"ok": not faults, "faults": faults, "points": seen})
    else:
        say("\n".join([points_text(points), *(f"FAILED: {fault}" for fault in faults)] + ["ok"] * (not faults)))
    raise typer.Exit(1 if faults else 0)


def judge(points: Sequence[PointView], demand: Demand) -> list[str]:
    """Everything that is wrong with the points; empty when the demand is met."""
    counted = [point for point in points if not _superseded(point)]
    done = [point for point in counted if point.state is PointState.DONE]
    faults = [_unfinished(point) for point in counted if point.state is not PointState.DONE]
    if len(done) != demand.expect_points:
        faults.append(f"{len(done)} points are done, {demand.expect_points} were expected")
    return faults + _metric_faults(done, demand)


def _superseded(point: PointView) -> bool:
    return point.superseded or point.reason is Reason.SUPERSEDED


def _unfinished(point: PointView) -> str:
    if point.state not in ENDS:
        return f"step {point.step} {point.suite} has not ended: it is {point.state}"
    why = ": ".join(part for part in (point.reason, point.detail) if part)
    return f"step {point.step} {point.suite} is {point.state} ({why})"


def _metric_faults(done: Sequence[PointView], demand: Demand) -> list[str]:
    suites = {point.suite for point in done if _value(point, demand.metric) is not None}
    if not suites:
        return [f"no done point has the metric {demand.metric!r}; there is {_names(done)}"]
    asked = [point for point in done if point.suite in suites]
    if demand.at is At.FINAL:
        last = max(point.step for point in done)
        asked = [point for point in asked if point.step == last]
        if not asked:
            return [f"no point at the last step, {last}, has the metric {demand.metric!r}"]
    short = [fault for point in asked if (fault := _shortfall(point, demand))]
    return [] if demand.at is At.ANY and len(short) < len(asked) else short


def _shortfall(point: PointView, demand: Demand) -> str | None:
    value = _value(point, demand.metric)
    if value is None:
        return f"step {point.step} {point.suite} lacks the metric {demand.metric!r}"
    if demand.reached(value):
        return None
    sign = ">=" if demand.direction is Direction.MAX else "<="
    return f"step {point.step} {point.suite}: {demand.metric} is {value:.4g}, wanted {sign} {demand.threshold:g}"


def _value(point: PointView, metric: str) -> float | None:
    found = point.metrics.get(metric)
    if found is not None:
        return found.value
    return point.score if metric == "score" else None


def _names(done: Sequence[PointView]) -> str:
    return ", ".join(sorted({name for point in done for name in point.metrics})) or "none"
