"""Whether an engine's log-probs agree with a canary's, held against what was measured on a GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from eval_service.contract.canary import ROUNDING, Agreement, compare_canary

MEASUREMENTS = Path(__file__).parents[2] / "docs" / "measurements"
MEASURED = MEASUREMENTS / "2026-11-30-canary-one-h200.json"
ON_THE_CPU = MEASUREMENTS / "2026-11-30-canary-cpu.json"
Rows = list[list[float]]


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return dict(json.loads(MEASURED.read_text()))


def trainers(snapshot: dict[str, Any]) -> Rows:
    return [[pair[0] for pair in snapshot["logprobs"]]]


def engines(snapshot: dict[str, Any]) -> Rows:
    return [[pair[1] for pair in snapshot["logprobs"]]]


def shares(agreement: Agreement) -> tuple[float, float]:
    """Each figure as a part of its bound."""
    return agreement.mean / agreement.mean_bound, agreement.typical / agreement.typical_bound


def test_what_a_model_that_learned_loses_by_rounding_is_well_within_the_bounds(measured: dict[str, Any]) -> None:
    """Of 0.03, which is right for an untrained model, the mean of the worst of these sound snapshots is 0.026."""
    for snapshot in measured["snapshots"]:
        agreement = compare_canary(trainers(snapshot), engines(snapshot), "bfloat16")
        assert max(shares(agreement)) < 1 / 5, snapshot["step"]


def test_so_is_what_a_tiny_one_loses_on_the_cpu() -> None:
    for snapshot in json.loads(ON_THE_CPU.read_text())["snapshots"]:
        agreement = compare_canary(trainers(snapshot), engines(snapshot), "bfloat16")
        assert max(shares(agreement)) < 0.3, snapshot["step"]


def test_an_engine_that_holds_another_snapshot_is_told(measured: dict[str, Any]) -> None:
    """All that are more than a step apart: those of 160 and 200 by their typical difference alone."""
    snapshots = [one for one in measured["snapshots"] if one["step"] != 241]
    for wanted in snapshots:
        for held in snapshots:
            agreement = compare_canary(trainers(wanted), engines(held), "bfloat16")
            assert agreement.ok == (wanted is held), (wanted["step"], held["step"])


def test_few_tokens_that_are_far_off_are_told_and_so_are_many_that_are_a_little() -> None:
    wanted = [[-11.0 - 0.01 * at for at in range(40)]]
    few = [[value - (2.0 if at == 7 else 0.0) for at, value in enumerate(wanted[0])]]
    many = [[value + 0.05 for value in wanted[0]]]
    by_few, by_many = (compare_canary(wanted, seen, "bfloat16") for seen in (few, many))
    assert (by_few.typical, by_few.ok) == (0.0, False)
    assert not by_many.ok
    assert compare_canary(wanted, [[value + 0.02 for value in wanted[0]]], "bfloat16").ok


def test_a_canary_with_a_wrong_number_does_not_widen_its_own_bounds() -> None:
    sound = [[-11.0 - 0.01 * at for at in range(124)]]
    for wrong in (-1e2, -1e4, -1e6):
        canary = [[wrong, *sound[0][1:]]]
        assert not compare_canary(canary, sound, "bfloat16").ok


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bounds_grow_with_the_spread_and_the_size_of_log_probs_and_are_never_below_the_floor(dtype: str) -> None:
    rounding = ROUNDING[dtype]
    none = compare_canary([[-1.0, -1.0]], [[-1.0, -1.0]], dtype)
    assert (none.mean_bound, none.typical_bound) == (rounding.floor, rounding.floor)
    wide = compare_canary([[-10.0, -60.0, -110.0]], [[0.0, 0.0, 0.0]], dtype)
    assert wide.mean_bound == pytest.approx(rounding.of_spread * 100 / 3)
    assert wide.typical_bound == pytest.approx(rounding.of_spread * 50)
    large = compare_canary([[-1e4, -1e4, -1e4]], [[0.0, 0.0, 0.0]], dtype)
    assert large.mean_bound == large.typical_bound == pytest.approx(rounding.of_size * 1e4)


def test_in_float32_weights_moved_by_next_to_nothing_are_told_whatever_the_spread() -> None:
    """What was seen of weights moved by 1e-5, and of the same weights."""
    for half, moved, rounded in ((0.8, 2.4e-4, 4.9e-7), (3.6, 1.15e-3, 2.5e-6), (18.7, 6.7e-3, 1.3e-5)):
        wanted = [[-20.0 - half, -20.0 + half] * 20]
        assert compare_canary(wanted, [[value + rounded for value in wanted[0]]], "float32").ok
        assert not compare_canary(wanted, [[value + moved for value in wanted[0]]], "float32").ok


def test_the_loosest_of_the_dtypes_counts_and_one_that_is_not_known_is_as_loose() -> None:
    rows = [[-1.0, -1.0]]
    for dtypes in (("float32", "torch.bfloat16"), ("bfloat16", "float32"), ("float8_e4m3fn",)):
        assert compare_canary(rows, rows, *dtypes).mean_bound == ROUNDING["bfloat16"].floor
    assert compare_canary(rows, rows, "torch.float32", "float32").mean_bound == ROUNDING["float32"].floor


@pytest.mark.parametrize("seen", [[[math.nan, 1.0]], [[math.inf, 1.0]], [[1.0]], [[1.0], [1.0]], []])
def test_numbers_that_are_not_finite_or_not_there_are_infinitely_wrong(seen: Rows) -> None:
    agreement = compare_canary([[1.0, 1.0]], seen, "bfloat16")
    assert (agreement.mean, agreement.typical, agreement.ok) == (math.inf, math.inf, False)


def test_a_difference_over_nothing_is_no_proof() -> None:
    assert not compare_canary([[]], [[]], "bfloat16").ok
    assert not compare_canary([], [], "bfloat16").ok


def test_both_figures_and_both_bounds_are_told() -> None:
    told = str(compare_canary([[-1.0, -1.0, -1.0, -1.0]], [[-1.5, -1.0, -1.0, -1.0]], "bfloat16"))
    assert told == ("log-probs differ by 0.125 nats on average (at most 0.03 is right), typically by 0 (at most 0.03)")
