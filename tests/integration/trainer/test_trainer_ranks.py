"""Two ranks, however the model is cut over them, train as one and export what one exports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eval_service.contract.manifest import read_manifest
from eval_service.contract.snapshot import describe_directory
from tests.support.rank_pair import Case, Found, RankPair, rank_pair, run_case
from tests.support.stub_service import StubService
from tests.support.tiny_model import build_tiny_model
from tests.support.trainer_process import TrainerRuns
from trainer.crash import VARIABLE

# Processes that import torch and megatron-core take their time on a busy machine.
pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

ALONE = "one rank"
LAYOUTS: dict[str, dict[str, Any]] = {
    ALONE: {},
    "tensor": {"tensor": 2},
    "tensor, sequence, padded": {"tensor": 2, "sequence_parallel": True, "vocab_multiple": 64},
    "pipeline, uneven, recomputed": {"pipeline": 2, "first_stage_layers": 1, "recompute": True},
    "data": {},
}
TENSOR, SEQUENCE, PIPELINE, DATA = tuple(LAYOUTS)[1:]
SHARED = "data, with the optimizer of GPUs"
TWO_RANKS = [*(("tied", layout) for layout in LAYOUTS if layout != ALONE), ("untied", TENSOR), ("untied", PIPELINE)]
RESHARDED = (
    ("tied", SEQUENCE, ALONE),
    ("tied", TENSOR, PIPELINE),
    ("tied", PIPELINE, SEQUENCE),
    ("tied", ALONE, PIPELINE),
    ("tied", DATA, ALONE),
    ("untied", TENSOR, PIPELINE),
    ("untied", PIPELINE, TENSOR),
    ("untied", ALONE, TENSOR),
)


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPair]:
    """Two ranks for the module."""
    with rank_pair(Path(__file__).parents[3]) as held:
        yield held


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, chats: Path) -> dict[str, Case]:
    """By the head, of three layers, so that two stages are uneven."""
    made = {}
    for head, is_tied in (("tied", True), ("untied", False)):
        directory = build_tiny_model(tmp_path_factory.mktemp(head), tied=is_tied, num_layers=3)
        made[head] = Case(str(directory), str(chats), "")
    return made


@pytest.fixture(scope="module")
def tied(cases: dict[str, Case]) -> Case:
    """The one whose head is its embedding."""
    return cases["tied"]


class Runs:
    """Runs of four steps that save each and export the last, once for each head and layout."""

    def __init__(self, pair: RankPair, cases: dict[str, Case], directory: Path) -> None:
        self._pair, self._cases, self._directory = pair, cases, directory
        self._found: dict[tuple[str, str], list[Found]] = {}

    def case(self, head: str, layout: str, place: str) -> Case:
        """One of these, in a directory of its own."""
        root = self._directory / f"{head} {layout} {place}"
        case = replace(self._cases[head], parallel=LAYOUTS.get(layout, {}), root=str(root), steps=4)
        return replace(case, distributed=SHARED in (layout, place))

    def whole(self, head: str, layout: str) -> list[Found]:
        """What each rank found."""
        if (head, layout) not in self._found:
            case = replace(self.case(head, layout, "whole"), save_dir=self.saves(head, layout))
            self._found[head, layout] = self.ranks(case, layout)
        return self._found[head, layout]

    def resumed(self, head: str, saved: str, layout: str, *, at: int) -> Found:
        """What rank 0 found of the steps after `at`, under one layout, from a checkpoint of another."""
        self.whole(head, saved)
        case = self.case(head, layout, saved if saved == SHARED else f"from {saved} at {at}")
        return self.ranks(replace(case, steps=4 - at, resume_at=at, save_dir=self.saves(head, saved)), layout)[0]

    def saves(self, head: str, layout: str) -> str:
        """Where the checkpoints of the whole run are."""
        return str(self._directory / f"saved {head} {layout}")

    def ranks(self, case: Case, layout: str) -> list[Found]:
        """Run it, on one rank or two."""
        return [run_case(case)] if layout == ALONE else self._pair.run(case)


@pytest.fixture(scope="module")
def runs_of(pair: RankPair, cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """For the module."""
    return Runs(pair, cases, tmp_path_factory.mktemp("runs"))


def _name(found: Found) -> str:
    """Of the snapshot: its step and digest."""
    assert found.published is not None
    return Path(found.published).name


def _tensors(found: Found) -> dict[str, torch.Tensor]:
    assert found.published is not None
    return load_file(Path(found.published) / "model.safetensors")


@pytest.mark.parametrize(("head", "layout"), TWO_RANKS)
def test_two_ranks_have_the_losses_of_one_and_export_the_same(runs_of: Runs, head: str, layout: str) -> None:
    both, (alone,) = runs_of.whole(head, layout), runs_of.whole(head, ALONE)
    for found in both:
        for (loss, norm, tokens), (loss_alone, norm_alone, tokens_alone) in zip(
            found.losses, alone.losses, strict=True
        ):
            assert loss == pytest.approx(loss_alone, abs=2e-5)
            assert norm == pytest.approx(norm_alone, rel=2e-4)
            assert tokens == tokens_alone
    ours, theirs = _tensors(both[0]), _tensors(alone)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        # Where a gradient is next to nothing, its sum's order decides where AdamW goes: by the rate at most.
        assert (ours[name] - tensor).abs().max() <= 4 * 2 * 1e-3, name
        assert (ours[name] - tensor).abs().mean() < 2e-5, name
    canaries = [read_manifest(Path(found.published or "")).canary for found in (both[0], alone)]
    assert all(canaries)
    first, second = (canary.logprobs[0] for canary in canaries if canary is not None)
    assert first == pytest.approx(second, abs=1e-3)
    assert sum(found.buffer_bytes for found in both) <= alone.buffer_bytes * 1.1


@pytest.mark.parametrize("layout", [TENSOR, SEQUENCE, PIPELINE, DATA])
def test_an_untouched_export_of_two_ranks_is_the_import_bit_by_bit_in_one_file_or_many(
    pair: RankPair, tied: Case, tmp_path: Path, layout: str
) -> None:
    untouched = replace(tied, steps=0, parallel=LAYOUTS[layout])
    imported = describe_directory(Path(tied.hf_path), run="run", step=0)
    digests = {}
    for name, limit in (("one", 2 << 30), ("many", 60_000)):
        found = pair.run(replace(untouched, root=str(tmp_path / name), max_file_bytes=limit))
        assert found[0].published is not None
        manifest = read_manifest(Path(found[0].published))
        assert manifest.tensor_digest == imported.tensor_digest
        digests[name] = len({tensor.file for tensor in manifest.tensors})
    assert digests["one"] == 1
    assert digests["many"] > 2
    assert not list(tmp_path.glob("*/run/.partial-*"))


@pytest.mark.parametrize("limit", [2 << 30, 60_000])
def test_a_disk_that_is_full_on_one_rank_alone_fails_the_export_on_both(
    pair: RankPair, tied: Case, tmp_path: Path, limit: int
) -> None:
    full = {VARIABLE: "in_export:1:raise"}
    case = replace(tied, steps=1, parallel={"tensor": 2}, root=str(tmp_path), env=full, max_file_bytes=limit)
    first, second = pair.run(case)
    assert first.published is None
    assert "rank 1" in str(first.fault)
    assert "injected fault" in str(first.fault)
    assert second.losses == first.losses
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_resumed_under_its_own_layout_has_the_losses_of_one_never_interrupted(runs_of: Runs, layout: str) -> None:
    whole, rest = runs_of.whole("tied", layout)[0], runs_of.resumed("tied", layout, layout, at=2)
    assert rest.losses == whole.losses[2:]
    assert _name(rest) == _name(whole)


@pytest.mark.parametrize(("head", "saved", "resumed"), RESHARDED)
def test_a_checkpoint_of_one_layout_is_resumed_under_another_to_the_same_losses(
    runs_of: Runs, head: str, saved: str, resumed: str
) -> None:
    assert _name(runs_of.resumed(head, saved, resumed, at=4)) == _name(runs_of.whole(head, saved)[0])  # bit by bit
    rest = runs_of.resumed(head, saved, resumed, at=2)
    for (loss, norm, tokens), wanted in zip(rest.losses, runs_of.whole(head, ALONE)[0].losses[2:], strict=True):
        assert (loss, norm) == pytest.approx(wanted[:2], rel=2e-4)
        assert tokens == wanted[2]


@pytest.mark.parametrize("layout", [SHARED, ALONE, SEQUENCE, PIPELINE])
def test_shares_of_the_distributed_optimizer_are_saved_by_their_ranks_and_resumed_under_any_layout(
    runs_of: Runs, layout: str
) -> None:
    whole = runs_of.whole("tied", SHARED)[0]
    rest = runs_of.resumed("tied", SHARED, layout, at=2)
    if layout == SHARED:
        assert rest.losses == whole.losses[2:]
        assert _name(rest) == _name(whole)
    for (loss, norm, tokens), wanted in zip(rest.losses, whole.losses[2:], strict=True):
        assert (loss, norm) == pytest.approx(wanted[:2], rel=2e-4)
        assert tokens == wanted[2]


def test_main_parameters_and_moments_of_a_bfloat16_model_are_resumed_too(tied: Case, tmp_path: Path) -> None:
    case = replace(tied, root=str(tmp_path / "a"), save_dir=str(tmp_path / "saved"), train={"dtype": "bfloat16"})
    whole = run_case(replace(case, steps=4, save_dir=None))
    run_case(replace(case, steps=2))
    assert run_case(replace(case, steps=2, resume_at=2, root=str(tmp_path / "b"))).losses == whole.losses[2:]


def test_a_save_that_fails_on_one_rank_alone_is_given_up_on_both_and_the_one_before_is_the_latest(
    pair: RankPair, tied: Case, tmp_path: Path
) -> None:
    full = {VARIABLE: "in_save:2:raise"}
    saved = tmp_path / "saved"
    case = replace(tied, steps=2, parallel={"tensor": 2}, root=str(tmp_path), save_dir=str(saved), env=full)
    for found in pair.run(case):
        assert "rank 1" in str(found.save_fault)
    assert [path.name for path in saved.iterdir()] == ["step_1"]


@pytest.mark.parametrize("layout", ["tensor, sequence, padded", "pipeline, uneven, recomputed"])
def test_packed_rows_give_two_ranks_the_losses_of_one(pair: RankPair, tied: Case, tmp_path: Path, layout: str) -> None:
    packed = replace(tied, packing=True, root=str(tmp_path / "a"), train={"global_batch_size": 8})
    alone = run_case(packed)
    both = pair.run(replace(packed, parallel=LAYOUTS[layout], root=str(tmp_path / "b")))
    assert alone.losses[0][2] > 48  # more than the plain batch has
    for found in both:
        assert [loss for loss, _, _ in found.losses] == pytest.approx([loss for loss, _, _ in alone.losses], abs=2e-5)


def test_two_ranks_under_torchrun_train_and_drain_once_when_they_are_told_to_end(
    runs: TrainerRuns, stub: StubService
) -> None:
    """Rank 0 alone talks to the service. The others must not end with an error before it has drained: torchrun would
    kill it."""
    settings = ("parallel.tensor=2", "eval.interval=1", "train.save_hf=true", "train.save_interval=2")
    result = runs.torchrun(*settings, "train.num_steps=6", ranks=2, crash="in_step:3:term")
    assert result.returncode == 143, result.stderr
    assert stub.steps() == [0, 1, 2]
    assert len(stub.drains) == 1
    assert runs.events("stopped", "drain_end", "teardown") == ["stopped:3", "drain_end", "teardown"]
    assert [path.name.split("-")[0] for path in runs.snapshots()] == ["step_1", "step_2"]
    saved = runs.output_dir / "checkpoints"
    assert {path.name for path in (saved / "step_3").glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    (hf,) = (saved / "hf" / "tiny").glob("step_2-*")
    assert hf.name == runs.snapshots()[-1].name  # the same content has the same digest, whoever wrote it


def test_a_layout_that_the_model_or_the_ranks_do_not_fit_is_refused_by_name(runs: TrainerRuns) -> None:
    for setting, field in (
        ("parallel.tensor=4", "parallel"),
        ("parallel.pipeline=5", "parallel"),
        ("parallel.data=2", "parallel.data"),
    ):
        result = runs.launch(setting)
        assert result.returncode == 2
        assert f"{field}: " in result.stderr
