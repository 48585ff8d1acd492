"""Early stop by patience: which point is best, since when nothing got better, and what is too little to count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval_service.contract.results import Action, Direction
from eval_service.suites.advice import Scored, judge

MAX, MIN = Direction.MAX, Direction.MIN


def curve(*values: float) -> list[Scored]:
    return [Scored(f"p{step}", step, value) for step, value in enumerate(values)]


def test_without_a_point_training_goes_on() -> None:
    judged = judge([], MAX, patience=1)
    assert (judged.action, judged.best, judged.since) == (Action.CONTINUE, None, 0)


@pytest.mark.parametrize(("patience", "action"), [(1, Action.STOP), (2, Action.STOP), (3, Action.CONTINUE)])
def test_it_stops_after_patience_points_without_improvement(patience: int, action: Action) -> None:
    judged = judge(curve(0.1, 0.5, 0.4, 0.3), MAX, patience=patience)
    assert judged.best is not None
    assert (judged.action, judged.best.step, judged.since) == (action, 1, 2)


def test_less_can_be_better() -> None:
    judged = judge(curve(3.0, 2.0, 2.5), MIN, patience=1)
    assert judged.best is not None
    assert (judged.action, judged.best.step) == (Action.STOP, 1)


def test_small_gains_are_the_best_and_no_improvement() -> None:
    judged = judge(curve(0.50, 0.504, 0.506), MAX, patience=2, min_delta=0.01)
    assert judged.best is not None
    assert judged.improved is not None
    assert (judged.action, judged.best.step, judged.improved.step) == (Action.STOP, 2, 0)


def test_of_equals_the_newest_is_best_as_garbage_collection_has_it_and_equal_is_no_improvement() -> None:
    judged = judge(curve(0.5, 0.5, 0.5), MAX, patience=2)
    assert judged.best is not None
    assert (judged.best.step, judged.action, judged.since) == (2, Action.STOP, 2)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.integers(1, 10), st.sampled_from(Direction))
def test_the_best_is_the_best_and_a_run_that_just_improved_is_never_stopped(
    values: list[float], patience: int, direction: Direction
) -> None:
    judged = judge(curve(*values), direction, patience=patience)
    assert judged.best is not None
    assert judged.best.value == (max(values) if direction is MAX else min(values))
    assert (judged.action is Action.STOP) == (judged.since >= patience)
    if len(values) == 1 or direction.better(values[-1], max(values[:-1]) if direction is MAX else min(values[:-1])):
        assert judged.action is Action.CONTINUE
