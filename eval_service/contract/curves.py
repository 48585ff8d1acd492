"""What the dashboard asks for besides the rest of the API: a run's curve in few bytes, and a run's drains."""

from __future__ import annotations

from pydantic import Field

from eval_service.contract.results import AlarmKind, Direction, Wire
from eval_service.contract.states import PointState, Reason


class Span(Wire):
    """A metric's value and its 95% interval."""

    value: float
    low: float | None = None
    high: float | None = None


class CurvePoint(Wire):
    """A step of a curve; without values it is a gap, and the reason says why."""

    id: str
    step: int
    state: PointState
    reason: Reason | None
    lag_steps: int | None
    alarms: tuple[AlarmKind, ...]
    values: dict[str, Span] = Field(description="of the metrics that were asked for")


class Curve(Wire):
    """`GET /runs/{run}/curve`: the points that count of one suite, by step."""

    run: str
    suite: str
    suites: tuple[str, ...] = Field(description="that the run has points of, or is to have")
    headline: str | None = Field(description="the metric that the suite is judged by; None: no result yet")
    direction: Direction
    metrics: tuple[str, ...] = Field(description="all that the points have")
    best: str | None = Field(description="the point that is best by the headline metric")
    points: tuple[CurvePoint, ...]


class DrainView(Wire):
    """A drain, without its receipt."""

    drain: str
    run: str
    started_at: float
    deadline: float
    ended_at: float | None


class DrainPage(Wire):
    """`GET /drains`, the newest first."""

    drains: tuple[DrainView, ...]
    total: int
