"""Checkpoints: a resumed run is the run that was never interrupted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.stub_service import StubService
from tests.support.tiny_model import build_tiny_model
from tests.support.trainer_process import TrainerRuns
from trainer.checkpoint import CheckpointStore
from trainer.steplog import read_steplog

pytestmark = pytest.mark.real

QUIET = ("eval.interval=none", "eval.suites=[]", "train.save_interval=2", "train.num_steps=7", "train.warmup_steps=2")


def losses(log: list[dict[str, Any]]) -> dict[int, Any]:
    """Loss, rate and norm of each step, the last time that it was trained."""
    return {e["step"]: (e["loss"], e["lr"], e["grad_norm"]) for e in log if e["event"] == "step_end"}


def test_a_killed_and_resumed_run_has_the_losses_of_one_never_interrupted(runs: TrainerRuns, stub: StubService) -> None:
    assert runs.launch(*QUIET, 'run.name="whole"', 'run.output_dir="whole"').returncode == 0
    assert runs.launch(*QUIET, crash="settled:6").returncode == -9
    assert runs.launch(*QUIET).returncode == 0
    assert [entry["start"] for entry in runs.log() if entry["event"] == "start"] == [0, 4]
    whole = losses(read_steplog(runs.directory / "whole" / "steps.jsonl"))
    assert sorted(whole) == [1, 2, 3, 4, 5, 6, 7]
    assert losses(runs.log()) == whole


def test_a_trainer_killed_while_it_saves_leaves_nothing_that_resume_trusts(
    runs: TrainerRuns, stub: StubService
) -> None:
    """The symptom: a crash mid-save leaves a directory that resume trusts."""
    assert runs.launch(*QUIET, 'run.name="whole"', 'run.output_dir="whole"').returncode == 0
    store = CheckpointStore(runs.output_dir / "checkpoints", runs.run)
    assert runs.launch(*QUIET, crash="in_save:4").returncode == -9
    assert store.latest() == 2
    (half,) = store.directory.glob(".partial-*")
    assert list(half.glob("*.distcp"))
    assert runs.launch(*QUIET).returncode == 0
    assert [entry["start"] for entry in runs.log() if entry["event"] == "start"] == [0, 2]
    assert [entry["paths"] for entry in runs.log() if entry["event"] == "swept"] == [[str(half)]]
    assert not list(store.directory.glob(".*"))
    assert losses(runs.log()) == losses(read_steplog(runs.directory / "whole" / "steps.jsonl"))


def test_a_checkpoint_that_cannot_be_written_is_recorded_and_only_the_last_one_ends_the_run_in_failure(
    runs: TrainerRuns, stub: StubService
) -> None:
    assert runs.launch(*QUIET, crash="in_save:4:raise").returncode == 0
    store = CheckpointStore(runs.output_dir / "checkpoints", runs.run)
    assert store.steps() == [2, 6, 7]
    (failed,) = [entry for entry in runs.log() if entry["event"] == "save_failed"]
    assert (failed["step"], "injected fault" in failed["detail"]) == (4, True)
    assert not list(store.directory.glob(".*"))
    result = runs.launch(*QUIET, "train.num_steps=8", crash="in_save:8:raise")
    assert result.returncode == 1
    assert "injected fault" in result.stderr
    assert store.latest() == 7


def test_only_the_newest_checkpoints_are_left(runs: TrainerRuns, stub: StubService) -> None:
    assert runs.launch(*QUIET, "train.keep_checkpoints=2", "train.save_hf=true").returncode == 0
    store = CheckpointStore(runs.output_dir / "checkpoints", runs.run)
    assert store.steps() == [6, 7]
    assert len(list((store.hf_root / runs.run).glob("step_*"))) == 4


def test_a_packed_run_that_is_killed_and_resumed_has_the_losses_of_one_never_interrupted(
    runs: TrainerRuns, stub: StubService
) -> None:
    packed = (*QUIET, "data.packing=true", "data.max_length=96")
    assert runs.launch(*packed, 'run.name="whole"', 'run.output_dir="whole"').returncode == 0
    assert runs.launch(*packed, crash="settled:6").returncode == -9
    assert runs.launch(*packed).returncode == 0
    assert losses(runs.log()) == losses(read_steplog(runs.directory / "whole" / "steps.jsonl"))


def test_a_resumed_run_says_that_its_data_is_another(runs: TrainerRuns, stub: StubService) -> None:
    assert runs.launch(*QUIET, crash="settled:6").returncode == -9
    assert runs.launch(*QUIET, "data.packing=true", "train.seed=1").returncode == 0
    (changed,) = [entry["changed"] for entry in runs.log() if entry["event"] == "data_changed"]
    assert changed == ["rows", "seed"]


def test_a_fresh_run_over_another_ones_checkpoints_is_refused(runs: TrainerRuns, stub: StubService) -> None:
    assert runs.launch(*QUIET).returncode == 0
    result = runs.launch(*QUIET, "train.resume=false")
    assert result.returncode == 2
    assert "train.save_dir" in result.stderr


def test_a_checkpoint_of_another_model_is_refused(runs: TrainerRuns, stub: StubService) -> None:
    assert runs.launch(*QUIET).returncode == 0
    other = build_tiny_model(runs.directory / "other", hidden_size=32)
    result = runs.launch(*QUIET, "train.num_steps=9", f'model.hf_path="{other}"')
    assert result.returncode == 2
    assert "another model" in result.stderr


def test_what_cannot_work_is_refused_by_name(runs: TrainerRuns, stub: StubService) -> None:
    bad = {
        "model.hf_path=nowhere": "model.hf_path",
        "train.global_batch_size=64": "data.train",
        "data.train=nowhere.jsonl": "data.train",
        "train.colour=red": "train.colour",
        "eval.interval=0": "eval.interval",
        "train.offload_train=true": "train.offload_train",  # there is no GPU
    }
    for setting, field in bad.items():
        result = runs.launch(setting, "train.micro_batch_size=1")
        assert result.returncode == 2, setting
        assert result.stderr.startswith(f"evalfleet-train: {field}: ")
        assert result.stderr.count("\n") == 1


def test_plan_prints_and_trains_nothing(runs: TrainerRuns, stub: StubService) -> None:
    result = runs.launch("train.num_steps=6", plan=True)
    assert result.returncode == 0
    assert "plan: points at steps 0, 2, 4, 6 (final)" in result.stdout
    assert not runs.run_dir.exists()
    assert stub.calls == []


def test_a_run_on_dumped_batches_has_the_losses_of_the_run_that_dumped_them(
    runs: TrainerRuns, stub: StubService
) -> None:
    """Neither the data, its order nor its packing is made again, so a fault is met again."""
    packed = ("data.packing=true", "data.max_length=96")
    assert runs.launch(*QUIET, *packed, 'data.save_debug_data="dumped"').returncode == 0
    rows = json.loads((runs.directory / "dumped" / "step_1.json").read_text())["examples"]
    assert any(len(row["starts"]) > 1 for row in rows)
    again = (*QUIET, 'run.name="again"', 'run.output_dir="again"', 'data.load_debug_data="dumped"')
    result = runs.launch(*again, 'data.train="gone.jsonl"', "train.seed=9")
    assert result.returncode == 0, result.stderr
    assert losses(read_steplog(runs.directory / "again" / "steps.jsonl")) == losses(runs.log())
