"""A run's curve in few bytes, with each point beside another one on the same prompts; and a run's drains."""

from __future__ import annotations

from pydantic import Field

from eval_service.contract.results import AlarmKind, Compared, Comparison, Direction, Verdict, Wire
from eval_service.contract.states import PointState, Reason


class Span(Wire):
    """A metric's value and its 95% interval."""

    value: float
    low: float | None = None
    high: float | None = None


class Beside(Wire):
    """A point beside another one of its curve, on the prompts that both scored: the point minus the other one."""

    point: str = Field(description="the other one")
    step: int
    difference: float | None = Field(description="None: the two can't be compared, and `said` tells why")
    stderr: float | None = None
    low: float | None = Field(default=None, description="of the difference's 95% interval")
    high: float | None = None
    p_value: float | None = None
    method: str | None = Field(default=None, description="as of a comparison")
    verdict: Verdict = Verdict.UNDECIDED
    prompts: int = Field(default=0, description="that both points scored")
    improved: int = 0
    worsened: int = 0
    said: str = Field(description="`step 800 is better than step 600: +2.1 ± 0.8 points (p=0.012)`")


class CurvePoint(Wire):
    """A step of a curve; without values it is a gap, and the reason says why."""

    id: str
    step: int
    state: PointState
    reason: Reason | None
    lag_steps: int | None
    alarms: tuple[AlarmKind, ...]
    values: dict[str, Span] = Field(description="of the metrics that were asked for")
    beside: Beside | None = Field(default=None, description="where `against` was asked, and there is another one")


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
    against: str | None = Field(default=None, description="what each point is compared with: before, best, or a step")
    uncompared: int = Field(default=0, description="points that were not yet: the same again compares more of them")


def sentence(a: Compared, b: Compared, found: Beside | Comparison) -> str:
    """Whether b is better than a: `step 800 is better than step 600: +2.1 ± 0.8 points (p=0.012)`.

    Shares are told in points of a hundred; what stands behind the ± is the standard error.
    """
    if found.difference is None:
        return f"there is no prompt that both step {b.step} and step {a.step} scored"
    said = {
        Verdict.BETTER: "is better than",
        Verdict.WORSE: "is worse than",
        Verdict.UNDECIDED: "can't be told from",
    }[found.verdict]
    shares = all(0.0 <= (side.mean or 0.0) <= 1.0 for side in (a, b))
    shown, unit = ("{:.1f}", " points") if shares else ("{:.4g}", "")
    scale = 100.0 if shares else 1.0
    sure = f" ± {shown.format(scale * found.stderr)}" if found.stderr is not None else ""
    p = f"p={found.p_value:.2g}" if found.p_value is not None else "no p-value"
    sign = "+" if found.difference >= 0 else ""
    return f"step {b.step} {said} step {a.step}: {sign}{shown.format(scale * found.difference)}{sure}{unit} ({p})"


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
