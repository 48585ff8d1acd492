"""Two ranks, however the model is cut over them, train as one and export what one exports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval_service.contract.manifest import read_manifest
from eval_service.contract.snapshot import describe_directory
from tests.support.rank_pair import Case, Found, RankPair, rank_pair, run_case
from tests.support.stub_service import StubService
from tests.support.tiny_model import build_tiny_model
from tests.support.trainer_process import TrainerRuns
from trainer.crash import VARIABLE

pytestmark = pytest.mark.real

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "tensor, sequence, padded": {"tensor": 2, "sequence_parallel": True, "vocab_multiple": 64},
    "pipeline, uneven, recomputed": {"pipeline": 2, "first_stage_layers": 1, "recompute": True},
    "data": {},
}
UNTIED = ("tensor", "pipeline, uneven, recomputed")


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPair]:
    """Two ranks for the module."""
    with rank_pair(Path(__file__).parents[3]) as held:
        yield held


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory, chats: Path) -> Case:
    """Three layers, so that two stages are uneven."""
    return Case(str(build_tiny_model(tmp_path_factory.mktemp("tied"), num_layers=3)), str(chats), "")


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory, chats: Path) -> Case:
    """The same with a head of its own."""
    return Case(str(build_tiny_model(tmp_path_factory.mktemp("untied"), tied=False, num_layers=3)), str(chats), "")


@pytest.fixture(scope="module")
def tied_alone(tied: Case, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What one rank finds."""
    return run_case(replace(tied, root=str(tmp_path_factory.mktemp("alone"))))


@pytest.fixture(scope="module")
def untied_alone(untied: Case, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What one rank finds."""
    return run_case(replace(untied, root=str(tmp_path_factory.mktemp("alone"))))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_have_the_losses_of_one_and_export_the_same(
    pair: RankPair, tied: Case, tied_alone: Found, tmp_path: Path, layout: str
) -> None:
    _same_as_alone(pair, tied, tied_alone, tmp_path, layout)


@pytest.mark.parametrize("layout", UNTIED)
def test_so_they_do_with_a_head_of_its_own(
    pair: RankPair, untied: Case, untied_alone: Found, tmp_path: Path, layout: str
) -> None:
    _same_as_alone(pair, untied, untied_alone, tmp_path, layout)


def _same_as_alone(pair: RankPair, case: Case, alone: Found, tmp_path: Path, layout: str) -> None:
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


@pytest.mark.parametrize("layout", LAYOUTS)
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


ALONE = "one rank"
RESHARDED = (
    ("tensor, sequence, padded", ALONE),
    ("tensor", "pipeline, uneven, recomputed"),
    ("pipeline, uneven, recomputed", "tensor, sequence, padded"),
    (ALONE, "tensor"),
    (ALONE, "pipeline, uneven, recomputed"),
    ("data", ALONE),
)


def _ran(pair: RankPair, case: Case, layout: str) -> Found:
    """What rank 0 finds of a case under a layout."""
    return run_case(case) if layout == ALONE else pair.run(replace(case, parallel=LAYOUTS[layout]))[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_resume_to_the_losses_of_a_run_that_was_never_interrupted(
    pair: RankPair, tied: Case, tmp_path: Path, layout: str
) -> None:
    case = replace(tied, parallel=LAYOUTS[layout], root=str(tmp_path / "a"), save_dir=str(tmp_path / "saved"))
    whole = pair.run(replace(case, steps=4, save_dir=None))[0]
    pair.run(replace(case, steps=2))
    rest = pair.run(replace(case, steps=2, resume_at=2, root=str(tmp_path / "b")))[0]
    assert rest.losses == whole.losses[2:]
    assert (rest.published or "").split("/")[-1] == (whole.published or "").split("/")[-1]


@pytest.mark.parametrize(
    ("head", "saved", "resumed"),
    [*(("tied", *layouts) for layouts in RESHARDED), *(("untied", *layouts) for layouts in RESHARDED[1:3])],
)
def test_a_checkpoint_of_one_layout_is_resumed_under_another_to_the_same_losses(
    pair: RankPair, tied: Case, untied: Case, tmp_path: Path, head: str, saved: str, resumed: str
) -> None:
    whole = replace(tied if head == "tied" else untied, root=str(tmp_path / "whole"))
    uninterrupted = run_case(replace(whole, steps=4))
    case = replace(whole, root=str(tmp_path / "a"), save_dir=str(tmp_path / "saved"))
    left = _ran(pair, replace(case, steps=2), saved)
    there = _ran(pair, replace(case, steps=0, resume_at=2, root=str(tmp_path / "b")), resumed)
    assert (there.published or "").split("/")[-1] == (left.published or "").split("/")[-1]  # bit by bit
    rest = _ran(pair, replace(case, steps=2, resume_at=2, root=str(tmp_path / "c")), resumed)
    for (loss, norm, tokens), wanted in zip(rest.losses, uninterrupted.losses[2:], strict=True):
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


def test_torchrun_trains_over_two_ranks_and_rank_0_alone_talks_to_the_service(
    runs: TrainerRuns, stub: StubService
) -> None:
    result = runs.torchrun("parallel.tensor=2", "eval.interval=1", "train.save_hf=true", ranks=2)
    assert result.returncode == 0, result.stderr
    assert stub.steps() == [0, 1, 2, 3, 4]
    assert len(stub.drains) == 1
    assert runs.events("drain_end", "teardown") == ["drain_end", "teardown"]
    assert [path.name.split("-")[0] for path in runs.snapshots()] == ["step_1", "step_2", "step_3", "step_4"]
    saved = runs.output_dir / "checkpoints"
    assert {path.name for path in (saved / "step_4").glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    (hf,) = (saved / "hf" / "tiny").glob("step_4-*")
    assert hf.name == runs.snapshots()[-1].name  # the same content has the same digest, whoever wrote it


def test_ranks_that_are_told_to_end_drain_once_and_the_exit_code_says_so(runs: TrainerRuns, stub: StubService) -> None:
    """The others must not end with an error before the first one has drained: torchrun would kill it."""
    result = runs.torchrun(
        "parallel.tensor=2", "train.num_steps=6", ranks=2, crash="in_step:3:term", module="trainer.ranks"
    )
    assert result.returncode == 143, result.stderr
    assert len(stub.drains) == 1
    assert runs.events("stopped", "drain_end") == ["stopped:3", "drain_end"]


def test_a_layout_that_the_model_or_the_ranks_do_not_fit_is_refused_by_name(runs: TrainerRuns) -> None:
    for setting, field in (
        ("parallel.tensor=4", "parallel"),
        ("parallel.pipeline=5", "parallel"),
        ("parallel.data=2", "parallel.data"),
    ):
        result = runs.launch(setting)
        assert result.returncode == 2
        assert f"{field}: " in result.stderr
