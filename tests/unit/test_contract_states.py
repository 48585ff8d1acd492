"""The table of a point's life: walked whole."""

from __future__ import annotations

import itertools

import pytest

from eval_service.contract.states import ENDS, LIVE, REASONS, TRANSITIONS, PointState, Reason, check_transition


def allowed(old: PointState, new: PointState, reason: Reason | None) -> bool:
    try:
        check_transition(old, new, reason)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("old", "new"), list(itertools.product(PointState, PointState)))
def test_a_move_is_allowed_exactly_as_the_table_has_it(old: PointState, new: PointState) -> None:
    for reason in (*Reason, None):
        right = reason in REASONS[new] if new in REASONS else reason is None
        assert allowed(old, new, reason) == (new in TRANSITIONS[old] and right)


def test_every_state_is_in_the_table_and_can_be_reached_from_a_reservation() -> None:
    assert set(TRANSITIONS) == set(PointState)
    reached, edge = {PointState.RESERVED}, {PointState.RESERVED}
    while edge:
        edge = {new for old in edge for new in TRANSITIONS[old]} - reached
        reached |= edge
    assert reached == set(PointState)


def test_done_is_never_left_and_the_other_ends_only_for_the_queue() -> None:
    assert TRANSITIONS[PointState.DONE] == frozenset()
    for end in ENDS - {PointState.DONE}:
        assert TRANSITIONS[end] == {PointState.QUEUED}


def test_every_point_that_has_not_ended_can_be_cancelled_and_skipped() -> None:
    for state in set(PointState) - ENDS:
        assert {PointState.CANCELLED, PointState.SKIPPED} <= TRANSITIONS[state]


def test_what_an_infrastructure_fault_interrupts_goes_back_to_the_queue() -> None:
    for state in LIVE:
        assert PointState.QUEUED in TRANSITIONS[state]


def test_every_end_but_done_has_reasons_and_each_reason_belongs_to_one_end() -> None:
    assert set(REASONS) == ENDS - {PointState.DONE}
    listed = [reason for reasons in REASONS.values() for reason in reasons]
    assert sorted(listed) == sorted(Reason)


def test_only_a_scored_point_becomes_done() -> None:
    assert [state for state in PointState if PointState.DONE in TRANSITIONS[state]] == [PointState.SCORING]
