"""The list of faults: the same for the same seed, every kind in it, nothing that a short list has no time for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval_service.chaos.faults import BY_TRAINER, KNOBS, FaultKind, plan_faults
from eval_service.contract.errors import ConfigError


@given(seed=st.integers(0, 10_000), count=st.integers(0, 250))
def test_the_same_seed_is_the_same_list_and_a_longer_one_of_another_seed_differs(seed: int, count: int) -> None:
    faults = plan_faults(seed, count, runs=3)
    assert faults == plan_faults(seed, count, runs=3)
    assert [fault.number for fault in faults] == list(range(count))
    assert {fault.run for fault in faults} <= {0, 1, 2}
    assert all(fault.times > 0 and 0 <= fault.pick < 1 for fault in faults)
    if count > 20:
        assert faults != plan_faults(seed + 1, count, runs=3)


@given(seed=st.integers(0, 10_000))
def test_forty_faults_have_every_kind_but_the_one_that_takes_a_minute_and_two_hundred_have_that_too(seed: int) -> None:
    assert {fault.kind for fault in plan_faults(seed, 40, runs=3)} == set(FaultKind) - {FaultKind.KILL_SERVICE}
    many = [fault.kind for fault in plan_faults(seed, 200, runs=3)]
    assert set(many) == set(FaultKind)
    assert many.count(FaultKind.KILL_SERVICE) <= 3


@given(seed=st.integers(0, 10_000), kinds=st.lists(st.sampled_from(sorted(KNOBS)), unique=True, min_size=1))
def test_every_kind_comes_before_any_comes_again(seed: int, kinds: list[FaultKind]) -> None:
    came = [fault.kind for fault in plan_faults(seed, 3 * len(kinds), runs=3, kinds=kinds)]
    assert all(set(came[at : at + len(kinds)]) == set(kinds) for at in range(0, len(came), len(kinds)))


def test_only_the_kinds_that_were_asked_for_come() -> None:
    faults = plan_faults(0, 5, runs=1, kinds=(FaultKind.LOSE_LOCK, FaultKind.KILL_SERVICE))
    assert {fault.kind for fault in faults} == {FaultKind.LOSE_LOCK, FaultKind.KILL_SERVICE}


def test_what_is_stopped_for_good_is_only_what_serve_replaces() -> None:
    faults = plan_faults(3, 600, runs=3)
    endless = {fault.kind for fault in faults if fault.hold_s is None}
    assert endless == {FaultKind.STOP_CONTROLLER, FaultKind.STOP_GATEWAY, FaultKind.STOP_REPLICA}


def test_a_fault_is_done_by_the_trainer_or_to_the_service() -> None:
    assert not BY_TRAINER & KNOBS
    assert FaultKind.STOP_TRAINER in BY_TRAINER
    assert FaultKind.SERVICE_DISK_FULL not in BY_TRAINER


def test_a_count_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="--faults"):
        plan_faults(0, -1, runs=1)
