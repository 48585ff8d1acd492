"""When a step is evaluated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eval_service.contract.wire import Kind
from tests.support.properties import steady
from trainer.cadence import Point, describe, is_due, plan

steps = st.integers(1, 200)
intervals = st.none() | st.integers(1, 60)
epochs = st.none() | st.integers(1, 80)


def test_no_interval_is_never_due() -> None:
    assert not any(is_due(step, None, 1, 10) for step in range(12))


def test_due_at_multiples_ends_of_epochs_and_the_last_step() -> None:
    assert [step for step in range(13) if is_due(step, 4, 5, 11)] == [4, 5, 8, 10, 11]


def test_step_zero_and_steps_after_the_last_are_not_due() -> None:
    assert not is_due(0, 1, 1, 10)
    assert not is_due(11, 1, 1, 10)


@steady
@given(steps, intervals, epochs)
def test_the_last_step_is_always_due_unless_nothing_is(num_steps: int, interval: int | None, epoch: int | None) -> None:
    assert is_due(num_steps, interval, epoch, num_steps) is (interval is not None)


@steady
@given(steps, st.integers(1, 60), epochs, st.integers(0, 250), st.booleans())
def test_a_plan_ascends_never_has_the_next_step_early_and_ends_with_one_forced_final(
    num_steps: int, interval: int, epoch: int | None, start: int, skip: bool
) -> None:
    points = plan(
        start=start, num_steps=num_steps, interval=interval, steps_per_epoch=epoch, skip_eval_before_train=skip
    )
    labels = [point.step for point in points]
    assert labels == sorted(set(labels))
    assert [point for point in points if point.force] == [points[-1]]
    assert points[-1] == Point(max(start, num_steps), Kind.FINAL, force=True)
    before = [point for point in points if point.kind is Kind.BASELINE]
    assert before == ([] if skip or start >= num_steps else [Point(start, Kind.BASELINE)])


@steady
@given(steps, st.integers(1, 60), epochs, st.integers(0, 200))
def test_a_resumed_plan_goes_on_where_the_whole_one_does(
    num_steps: int, interval: int, epoch: int | None, start: int
) -> None:
    if start >= num_steps:
        return
    whole = plan(start=0, num_steps=num_steps, interval=interval, steps_per_epoch=epoch)
    resumed = plan(start=start, num_steps=num_steps, interval=interval, steps_per_epoch=epoch)
    assert [p for p in whole if p.step > start] == [p for p in resumed if p.step > start]


def test_an_eval_only_plan_is_the_base_model_once_and_forced_even_if_skipping() -> None:
    points = plan(start=0, num_steps=0, interval=5, steps_per_epoch=None, skip_eval_before_train=True)
    assert points == (Point(0, Kind.BASELINE, force=True),)


def test_with_no_interval_there_is_no_plan() -> None:
    assert plan(start=0, num_steps=0, interval=None, steps_per_epoch=None) == ()
    assert describe(()) == "no points: nothing is evaluated"


def test_a_long_plan_is_shortened_in_the_middle() -> None:
    points = plan(start=0, num_steps=1000, interval=10, steps_per_epoch=None)
    assert describe(points, limit=4) == "points at steps 0, 10, 20, ..., 1000 (final)"
