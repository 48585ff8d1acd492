"""Two ranks, however the model is cut over them, train as one and export what one exports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval_service.contract.manifest import read_manifest
from tests.support.rank_pair import Case, Found, RankPair, rank_pair, run_case
from tests.support.tiny_model import build_tiny_model

pytestmark = pytest.mark.real

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "tensor and sequence, padded vocabulary": {"tensor": 2, "sequence_parallel": True, "vocab_multiple": 64},
    "pipeline": {"pipeline": 2},
    "pipeline, uneven, recomputed": {"pipeline": 2, "first_stage_layers": 1, "recompute": True},
    "data": {},
}


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPair]:
    """Two ranks for the module."""
    with rank_pair(Path(__file__).parents[3]) as held:
        yield held


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def hf_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, so that two stages are uneven."""
    return build_tiny_model(tmp_path_factory.mktemp("three"), tied=request.param, num_layers=3)


@pytest.fixture(scope="module")
def case(hf_dir: Path, chats: Path) -> Case:
    """Three steps."""
    return Case(str(hf_dir), str(chats), "")


@pytest.fixture(scope="module")
def alone(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What one rank finds."""
    return run_case(replace(case, root=str(tmp_path_factory.mktemp("alone"))))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "pipeline"])
def test_two_ranks_have_the_losses_of_one_and_export_the_same(
    pair: RankPair, case: Case, alone: Found, tmp_path: Path, layout: str
) -> None:
    both = pair.run(replace(case, parallel=LAYOUTS[layout], root=str(tmp_path)))
    for found in both:
        for (loss, norm, tokens), (loss_alone, norm_alone, tokens_alone) in zip(
            found.losses, alone.losses, strict=True
        ):
            assert loss == pytest.approx(loss_alone, abs=2e-5)
            assert norm == pytest.approx(norm_alone, rel=2e-4)
            assert tokens == tokens_alone
    assert both[0].published is not None
    assert alone.published is not None
    ours, theirs = (read_manifest(Path(path)) for path in (both[0].published, alone.published))
    assert [(t.name, t.dtype, t.shape) for t in ours.tensors] == [(t.name, t.dtype, t.shape) for t in theirs.tensors]
    assert ours.canary is not None
    assert theirs.canary is not None
    assert ours.canary.logprobs[0] == pytest.approx(theirs.canary.logprobs[0], abs=1e-3)
    assert sum(found.buffer_bytes for found in both) <= alone.buffer_bytes * 1.1
