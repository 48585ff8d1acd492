"""How far an engine's log-probs may be from a canary's, held against what was measured on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval_service.contract.canary import TOLERANCE, USUAL_SPREAD, canary_tolerance, spread

MEASURED = Path(__file__).parents[2] / "docs" / "measurements" / "2026-11-30-canary-one-h200.json"


def _rows(snapshot: dict[str, Any], side: int) -> list[list[float]]:
    return [[pair[side] for pair in snapshot["logprobs"]]]


def test_what_a_model_that_learned_loses_by_rounding_is_well_within_its_tolerance() -> None:
    """Of 0.03, which is right for an untrained model, the worst of these sound snapshots took 0.026."""
    measured = json.loads(MEASURED.read_text())
    for snapshot in measured["snapshots"]:
        canary, seen = _rows(snapshot, 0), _rows(snapshot, 1)
        diff = sum(abs(a - b) for a, b in zip(canary[0], seen[0], strict=True)) / len(seen[0])
        assert diff == pytest.approx(snapshot["diff"], abs=1e-4)
        assert 3 * diff < canary_tolerance(canary, "bfloat16"), snapshot["step"]


def test_a_fault_of_a_model_that_learned_is_far_beyond_its_tolerance() -> None:
    measured = json.loads(MEASURED.read_text())
    tolerance = canary_tolerance(_rows(measured["snapshots"][-1], 0), "bfloat16")
    for fault in ("two_tensors_swapped", "a_layers_query_heads_reversed", "one_tensor_zero"):
        assert measured["faults"][fault] > 3 * tolerance, fault


def test_the_tolerance_grows_with_the_spread_and_is_never_below_the_dtypes() -> None:
    narrow, wide = [[-11.0, -11.5, -12.0]], [[-2.0, -12.0, -22.0]]
    assert spread(narrow) == pytest.approx(1 / 3)
    assert canary_tolerance(narrow, "float32") == TOLERANCE["float32"]
    assert canary_tolerance(wide, "float32") == pytest.approx(TOLERANCE["float32"] * spread(wide) / USUAL_SPREAD)
    assert canary_tolerance([], "float32") == TOLERANCE["float32"]


def test_the_looser_of_two_dtypes_counts_and_an_unknown_one_is_as_loose() -> None:
    rows = [[-1.0, -1.0]]
    assert canary_tolerance(rows, "float32", "torch.bfloat16") == TOLERANCE["bfloat16"]
    assert canary_tolerance(rows, "torch.float32", "float32") == TOLERANCE["float32"]
    assert canary_tolerance(rows, "float8_e4m3fn") == TOLERANCE["bfloat16"]
