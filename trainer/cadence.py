"""When a step is evaluated, as pure functions. Steps count completed ones: the base model is 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from eval_service.contract.wire import Kind


@dataclass(frozen=True, slots=True)
class Point:
    """A step to be evaluated, over all suites."""

    step: int
    kind: Kind
    force: bool = False

    @property
    def before_training(self) -> bool:
        """It is evaluated before the next step is trained."""
        return self.kind is Kind.BASELINE


def is_due(step: int, interval: int | None, steps_per_epoch: int | None, num_steps: int) -> bool:
    """Whether the step that was just completed (1..num_steps) is evaluated.

    Args:
        interval: None: never.
        steps_per_epoch: None: epochs are not known.
    """
    if interval is None or not 1 <= step <= num_steps:
        return False
    at_epoch_end = steps_per_epoch is not None and step % steps_per_epoch == 0
    return step == num_steps or step % interval == 0 or at_epoch_end


def plan(
    *,
    start: int,
    num_steps: int,
    interval: int | None,
    steps_per_epoch: int | None,
    skip_eval_before_train: bool = False,
) -> tuple[Point, ...]:
    """Every point of this launch, in order; `start` is the step resumed from, 0 for a fresh run.

    A finished run (`start` is the last step) has its final point planned; whether the ledger lacks it is asked later.
    """
    if interval is None:
        return ()
    if num_steps == 0:
        return (Point(0, Kind.BASELINE, force=True),)
    if start >= num_steps:
        return (Point(start, Kind.FINAL, force=True),)
    before = () if skip_eval_before_train else (Point(start, Kind.BASELINE),)
    return before + tuple(_after(range(start + 1, num_steps + 1), interval, steps_per_epoch, num_steps))


def _after(steps: Iterable[int], interval: int, steps_per_epoch: int | None, num_steps: int) -> Iterator[Point]:
    for step in steps:
        if is_due(step, interval, steps_per_epoch, num_steps):
            final = step == num_steps
            yield Point(step, Kind.FINAL if final else Kind.PERIODIC, force=final)


def describe(points: tuple[Point, ...], limit: int = 12) -> str:
    """One line: `points at steps 0, 100, ..., 1000 (final)`."""
    if not points:
        return "no points: nothing is evaluated"
    labels = [f"{point.step} (final)" if point.kind is Kind.FINAL else str(point.step) for point in points]
    if len(labels) > limit:
        labels = [*labels[: limit - 1], "...", labels[-1]]
    return f"points at steps {', '.join(labels)}"
