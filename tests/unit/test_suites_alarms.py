"""Alarms: raised by what saves a run, with the numbers, and never by chance alone."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eval_service.contract.results import Alarm, AlarmKind, Direction, Metric, SampleView
from eval_service.suites.alarms import COMPARING, Told, alarms_against, alarms_of, prompt_cut
from eval_service.suites.statistics import mean_of
from tests.support.views import sample

K = AlarmKind


def share(right: int, n: int) -> Metric:
    metric = mean_of([1.0] * right + [0.0] * (n - right))
    assert metric is not None
    return metric


def told(score: Metric | None, truncated: Metric | None = None, **changes: Any) -> Told:
    metrics = {"exact_match": score, "truncated": truncated}
    values: dict[str, Any] = {
        "point": "p1",
        "step": 1,
        "headline": "exact_match",
        "direction": Direction.MAX,
        "suite_digest": "d",
        "metrics": {name: metric for name, metric in metrics.items() if metric is not None},
    }
    return Told(**(values | changes))


def kinds(alarms: tuple[Alarm, ...]) -> list[AlarmKind]:
    return [alarm.kind for alarm in alarms]


def own(samples: list[SampleView], most: float = 0.05) -> list[AlarmKind]:
    return kinds(alarms_of(samples, Metric(value=0.5, n=9), max_error_rate=most))


# --- a point by itself


def test_a_sound_point_raises_nothing() -> None:
    assert own([sample(i, score=float(i % 2)) for i in range(50)]) == []
    assert own([]) == []


def test_a_model_that_never_ends_an_answer_is_told_unless_there_are_too_few() -> None:
    cut = [sample(i, finish_reason="length", output_tokens=16) for i in range(8)]
    assert own(cut) == [K.EOS_NEVER]
    assert own([*cut, sample(8)]) == []
    assert own(cut[:7]) == []
    assert own([sample(i, finish_reason="length", output_tokens=1) for i in range(8)]) == [], "a letter was asked for"


def test_where_nothing_has_a_score_the_usual_error_is_the_evidence() -> None:
    samples = [sample(i, score=0.0, error="boom" if i else "else", finish_reason=None) for i in range(4)]
    (alarm, *_) = alarms_of(samples, None, max_error_rate=1.0)
    assert (alarm.kind, alarm.evidence) == (K.NONE_SCORED, {"samples": 4, "errored": 4, "error": "boom"})


def test_scores_and_log_probs_that_are_no_numbers_are_told() -> None:
    assert own([sample(0, logprob=math.nan), sample(1, logprob=-3.0)]) == [K.NOT_FINITE]
    assert own([sample(0, error="the scorer returned nan"), *(sample(i) for i in range(1, 100))]) == [K.NOT_FINITE]


@given(st.integers(0, 100), st.floats(0, 1))
def test_errors_are_told_from_half_of_what_would_fail_the_point(errored: int, most: float) -> None:
    samples = [sample(i, error="no" if i < errored else None) for i in range(100)]
    assert (K.ERROR_RATE in own(samples, most=most)) == (errored > 0 and errored / 100 > most / 2)


def test_prompts_that_lost_their_beginning_are_told_with_how_many_and_how_much() -> None:
    (alarm,) = prompt_cut(12, 200, 35, 2048)
    assert alarm.message.startswith(
        "12 of 200 prompts lost up to 35 tokens at their beginning: the engine's context is 2048"
    )
    assert (alarm.kind, alarm.evidence) == (
        K.PROMPT_CUT,
        {"cut": 12, "prompts": 200, "most_tokens": 35, "context": 2048},
    )
    assert "lost 1 token at" in prompt_cut(3, 5, 1, 64)[0].message
    assert prompt_cut(0, 200, 0, 2048) == ()


# --- a point beside the one before


def test_the_first_point_is_compared_with_nothing() -> None:
    assert alarms_against(None, told(share(0, 100))) == ()


def test_a_score_that_falls_beyond_both_intervals_is_a_collapse_with_the_evidence() -> None:
    (alarm,) = alarms_against(told(share(80, 100)), told(share(40, 100), step=2))
    assert alarm.kind is K.SCORE_COLLAPSE
    assert (alarm.evidence["was"], alarm.evidence["is"], alarm.evidence["point"]) == (0.8, 0.4, "p1")
    assert alarms_against(told(share(8, 10)), told(share(5, 10), step=2)) == (), "ten answers say little"
    assert alarms_against(told(share(40, 100)), told(share(80, 100), step=2)) == ()


def test_where_less_is_better_more_is_the_collapse() -> None:
    low, high = told(share(40, 100), direction=Direction.MIN), told(share(80, 100), direction=Direction.MIN)
    assert kinds(alarms_against(low, high)) == [K.SCORE_COLLAPSE]
    assert alarms_against(high, low) == ()


def test_a_jump_of_truncated_answers_is_told() -> None:
    before, now = told(share(5, 10), share(2, 200)), told(share(5, 10), share(60, 200))
    assert kinds(alarms_against(before, now)) == [K.TRUNCATION_JUMP]
    assert alarms_against(now, before) == ()
    assert alarms_against(told(None, share(0, 10**6)), told(None, share(1000, 10**6))) == (), "sure, and too small"


def test_a_suite_that_changed_is_told_and_its_scores_are_not_compared() -> None:
    changed = told(share(1, 100), suite_digest="e", step=2)
    (alarm,) = alarms_against(told(share(99, 100)), changed)
    assert (alarm.kind, alarm.evidence["was"], alarm.evidence["is"]) == (K.SUITE_CHANGED, "d", "e")
    assert alarms_against(told(share(99, 100)), told(share(1, 100), headline="a/exact_match")) == ()


counts = st.tuples(st.integers(1, 400), st.floats(0, 1)).map(lambda drawn: share(round(drawn[0] * drawn[1]), drawn[0]))


@given(counts, counts, counts, counts)
def test_no_alarm_is_raised_where_intervals_meet_or_in_both_directions(
    a: Metric, b: Metric, cut_a: Metric, cut_b: Metric
) -> None:
    there, back = alarms_against(told(a, cut_a), told(b, cut_b)), alarms_against(told(b, cut_b), told(a, cut_a))
    assert not set(kinds(there)) & set(kinds(back))
    assert set(kinds(there)) <= COMPARING
    for alarm in there:
        first, second = (a, b) if alarm.kind is K.SCORE_COLLAPSE else (cut_b, cut_a)
        assert first.low is not None
        assert second.high is not None
        assert first.low > second.high
        assert {"was", "was_low", "was_high", "is", "is_low", "is_high", "step", "point"} == set(alarm.evidence)


@given(counts)
def test_a_point_never_raises_anything_beside_its_equal(metric: Metric) -> None:
    assert alarms_against(told(metric, metric), told(metric, metric)) == ()
