"""Which point is best, and whether a run still gets better: a pure function of its points, by patience.

Invariant: the best is the one that garbage collection keeps: of equals the newest. What counts as an improvement is
stricter: more than `min_delta` over the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval_service.contract.results import Action, Direction


@dataclass(frozen=True, slots=True)
class Scored:
    """A done point's value of the metric asked for."""

    point: str
    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Judged:
    """`best` and `improved` are None where there is no point yet."""

    action: Action
    why: str
    best: Scored | None
    improved: Scored | None  # the last improvement by more than min_delta
    since: int  # points after that


def judge(points: Sequence[Scored], direction: Direction, *, patience: int, min_delta: float = 0.0) -> Judged:
    """Judge a run by its points, in the order of their steps.

    Args:
        patience: stop once so many points in a row brought no improvement.
    """
    best = improved = None
    since = 0
    for point in points:
        if best is None or not direction.better(best.value, point.value):
            best = point
        gain = 0.0 if improved is None else (point.value - improved.value) * (1 if direction is Direction.MAX else -1)
        if improved is None or gain > min_delta:
            improved, since = point, 0
        else:
            since += 1
    if best is None or improved is None:
        return Judged(Action.CONTINUE, "no point has a result yet", None, None, 0)
    beyond = f" by more than {min_delta:g}" if min_delta else ""
    if since >= patience:
        why = f"none of the {since} points after step {improved.step} improved on {improved.value:.4g}{beyond}"
        return Judged(Action.STOP, why, best, improved, since)
    why = f"{since} of {patience} points without improvement{beyond} after step {improved.step}"
    return Judged(Action.CONTINUE, why, best, improved, since)
