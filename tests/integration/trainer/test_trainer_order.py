"""The trainer's promises on the order of things, on the real process: read from its step log and what was called."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoModelForCausalLM

from eval_service.contract.manifest import read_manifest
from eval_service.contract.outbox import Outbox
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import Kind, Receipt, Source
from eval_service.gc.collect import find_leftovers, remove_leftover
from eval_service.gc.plan import PARTIAL_IDLE_S, plan_leftovers
from tests.support.stub_service import StubService
from tests.support.trainer_process import TrainerRuns
from trainer.checkpoint import CheckpointStore

pytestmark = pytest.mark.real

ORDER = ("step_begin", "step_end", "save", "eval_dispatched", "eval_known", "drain_begin", "drain_end", "teardown")
# Of what the training thread does; a periodic point is handed over behind, at any time before the drain.
STEPS = ("step_begin", "step_end", "save", "eval_staged", "exception", "drain_begin", "drain_end", "teardown")


# Forty steps an epoch, whose ends are evaluated too.
ONE_BY_ONE = ("train.global_batch_size=1", "train.micro_batch_size=1")


def steps_around(events: list[str], event: str) -> tuple[list[str], list[str]]:
    """The events before and after one."""
    at = events.index(event)
    return events[:at], events[at + 1 :]


def test_fresh_run_evaluates_the_base_model_before_its_first_step_and_forces_the_last(
    runs: TrainerRuns, stub: StubService, tiny_model_dir: Path
) -> None:
    result = runs.launch("train.num_steps=5")
    assert result.returncode == 0, result.stderr
    assert "points at steps 0, 2, 4, 5 (final)" in result.stdout
    events = runs.events(*ORDER)
    assert events[:2] == ["eval_dispatched:0", "step_begin:1"]
    assert events[-4:] == ["eval_dispatched:5", "drain_begin", "drain_end", "teardown"]
    assert runs.events(*STEPS)[-6:] == ["step_end:5", "save:5", "eval_staged:5", "drain_begin", "drain_end", "teardown"]
    base, final = stub.point(0), stub.point(5)
    assert (base.kind, base.source, base.snapshot, base.force) == (
        Kind.BASELINE,
        Source.CALLER,
        str(tiny_model_dir),
        False,
    )
    assert (final.kind, final.source, final.force) == (Kind.FINAL, Source.STAGING, True)
    assert stub.steps() == [0, 2, 4, 5]
    assert [(p.step, p.suite) for p in stub.drains[0].planned] == [(step, "main") for step in (0, 2, 4, 5)]
    assert [path.name.split("-")[0] for path in runs.snapshots()] == ["step_2", "step_4", "step_5"]
    assert Receipt.model_validate_json((runs.output_dir / "receipt.json").read_bytes()).drained
    assert {path.name for path in runs.output_dir.iterdir()} >= {"config.json", "plan.json", "steps.jsonl"}
    entries = runs.log()
    assert [entry["seq"] for entry in entries] == list(range(1, len(entries) + 1))


def test_the_reservation_comes_before_the_export(runs: TrainerRuns, stub: StubService) -> None:
    assert runs.launch("train.num_steps=2", "eval.skip_eval_before_train=true").returncode == 0
    assert runs.events("eval_reserved", "eval_staged", "eval_exported", "eval_dispatched") == [
        "eval_reserved:2",
        "eval_staged:2",
        "eval_exported:2",
        "eval_dispatched:2",
    ]
    assert next(name for name, _ in stub.calls) == "PUT /runs/tiny"


def test_resumed_run_evaluates_the_step_it_resumed_from_and_never_the_next(
    runs: TrainerRuns, stub: StubService
) -> None:
    runs.launch("train.save_interval=1", crash="after_save:3")
    assert CheckpointStore(runs.output_dir / "checkpoints", "tiny").latest() == 3
    stub.points.clear()
    result = runs.launch("train.save_interval=1", "eval.interval=1", "train.num_steps=5")
    assert result.returncode == 0, result.stderr
    events = runs.events("start", *ORDER)
    events = events[len(events) - events[::-1].index("start") :]  # of the second launch
    assert events[:2] == ["eval_dispatched:3", "step_begin:4"]
    assert stub.steps() == [3, 4, 5]
    baseline = stub.point(3)
    assert (baseline.kind, baseline.source) == (Kind.BASELINE, Source.STAGING)
    # Its canary is that of the weights as loaded, though the steps after it are exported too.
    assert baseline.snapshot is not None
    canary = read_manifest(Path(baseline.snapshot)).canary
    assert canary is not None
    exported = AutoModelForCausalLM.from_pretrained(baseline.snapshot, dtype=torch.float32)
    saved = _saved(CheckpointStore(runs.output_dir / "checkpoints", "tiny").path(3), "embedding.word_embeddings.weight")
    assert torch.equal(exported.model.embed_tokens.weight, saved)
    assert torch.allclose(torch.tensor(canary.logprobs), _logprobs(exported, canary.token_ids), atol=1e-5)


def _saved(checkpoint: Path, name: str) -> torch.Tensor:
    reader = FileSystemReader(checkpoint)
    described = reader.read_metadata().state_dict_metadata[name]
    assert isinstance(described, TensorStorageMetadata)
    tensor = torch.empty(described.size)
    with warnings.catch_warnings():  # it tells that it reads in one process
        warnings.simplefilter("ignore")
        load({name: tensor}, storage_reader=reader, no_dist=True)
    return tensor


def _logprobs(model: torch.nn.Module, token_ids: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    ids = torch.tensor(token_ids)
    with torch.no_grad():
        table: torch.Tensor = model(ids).logits[:, :-1].log_softmax(-1)
    return table.gather(-1, ids[:, 1:, None]).squeeze(-1)


def test_a_step_that_was_evaluated_is_not_evaluated_again_by_the_launch_that_resumes_there(
    runs: TrainerRuns, stub: StubService
) -> None:
    runs.launch()
    assert runs.launch("train.num_steps=6").returncode == 0
    assert runs.events(*ORDER)[-10:-4] == [
        "eval_known:4",
        "step_begin:5",
        "step_end:5",
        "step_begin:6",
        "step_end:6",
        "save:6",
    ]
    assert stub.steps() == [0, 2, 4, 6]
    assert not list(runs.run_dir.glob(".partial-*"))


def test_reuse_evaluates_own_checkpoints_whose_save_comes_first(runs: TrainerRuns, stub: StubService) -> None:
    """The symptom: an accepted config silently ignores the directory that was chosen for the exports."""
    reuse = ("eval.snapshot_source=reuse", "train.save_hf=true", "train.save_interval=2", "train.save_dir=chosen")
    assert runs.launch(*reuse).returncode == 0
    events = runs.events("save", "eval_dispatched", "step_begin")
    assert steps_around(events, "eval_dispatched:2")[0][-1] == "save:2"
    point = stub.point(2)
    assert point.source is Source.REUSE
    assert point.snapshot is not None
    assert read_manifest(Path(point.snapshot)).digest == point.digest
    assert (Path(point.snapshot) / ".complete").exists()
    stub.points.clear()
    assert runs.launch(*reuse, "train.num_steps=6").returncode == 0
    assert stub.steps() == [4, 6]
    assert Path(stub.point(4).snapshot or "").parent == runs.directory / "chosen" / "hf" / runs.run


def test_where_the_eval_interval_is_no_save_interval_both_land_and_the_save_comes_first(
    runs: TrainerRuns, stub: StubService
) -> None:
    """The symptom: save and eval interval mismatch, and a checkpoint is not written until an evaluation has ended."""
    result = runs.launch(*ONE_BY_ONE, "train.num_steps=20", "train.save_interval=10", "eval.interval=20")
    assert result.returncode == 0, result.stderr
    events = runs.events("save", "eval_staged", "step_begin")
    assert [event for event in events if not event.startswith("step_begin")] == ["save:10", "save:20", "eval_staged:20"]
    assert sorted(runs.events("saved")) == ["saved:10", "saved:20"]
    assert stub.steps() == [0, 20]
    assert CheckpointStore(runs.output_dir / "checkpoints", "tiny").steps() == [10, 20]


def test_a_run_killed_at_20_and_resumed_has_one_point_at_20_and_one_baseline(
    runs: TrainerRuns, stub: StubService
) -> None:
    """The symptom: on resume a point is repeated, skipped, or the baseline is mislabelled."""
    settings = (*ONE_BY_ONE, "train.num_steps=22", "train.save_interval=10", "eval.interval=20")
    assert runs.launch(*settings, crash="settled:21").returncode == -9
    assert runs.launch(*settings).returncode == 0
    assert [entry["start"] for entry in runs.log() if entry["event"] == "start"] == [0, 20]
    assert stub.steps() == [0, 20, 22]
    assert [stub.point(step).kind for step in (0, 20, 22)] == [Kind.BASELINE, Kind.PERIODIC, Kind.FINAL]


def test_an_exporter_killed_mid_shard_leaves_nothing_that_is_seen_and_what_it_leaves_is_cleaned(
    runs: TrainerRuns, stub: StubService
) -> None:
    """The symptom: a crash mid-save leaves a directory that resume and consumers trust."""
    reuse = ("eval.snapshot_source=reuse", "train.save_hf=true", "train.save_interval=2")
    for settings, root in (((), runs.run_dir), (reuse, runs.output_dir / "checkpoints" / "hf" / runs.run)):
        assert runs.launch(*settings, crash="in_shard:2").returncode == -9
        (half,) = root.glob(".partial-*")
        assert list(half.glob("*.safetensors"))
        assert not list(root.glob("step_*"))
        assert not list(root.glob("*/.complete"))
        if settings:
            assert CheckpointStore(runs.output_dir / "checkpoints", "tiny").latest() is None
        else:  # the service's part: once nobody can be writing it any more
            (left,) = find_leftovers(root.parent, runs.run)
            assert plan_leftovers([left], (), now=left.touched_at + PARTIAL_IDLE_S) == (left,)
            remove_leftover(left, root.parent)
        assert runs.launch(*settings).returncode == 0
        assert list(root.glob(".partial-*")) == []
        shutil.rmtree(runs.output_dir)
        stub.points.clear()


def test_num_steps_zero_evaluates_the_base_model_once_and_ends(
    runs: TrainerRuns, stub: StubService, tiny_model_dir: Path
) -> None:
    assert runs.launch("train.num_steps=0", "eval.skip_eval_before_train=true").returncode == 0
    assert runs.events(*ORDER) == ["eval_dispatched:0", "drain_begin", "drain_end", "teardown"]
    assert [(p.step, p.snapshot, p.force) for p in stub.points] == [(0, str(tiny_model_dir), True)]
    assert runs.launch("train.num_steps=0").returncode == 0
    assert len(stub.points) == 1


def test_finished_run_resumed_trains_nothing_and_evaluates_only_a_lacking_final_point(
    runs: TrainerRuns, stub: StubService
) -> None:
    runs.launch()
    assert runs.launch().returncode == 0
    assert runs.events("step_begin").count("step_begin:4") == 1
    assert stub.steps() == [0, 2, 4]
    stub.points = [point for point in stub.points if point.step != 4]
    assert runs.launch().returncode == 0
    assert stub.steps() == [0, 2, 4]
    assert stub.point(4).kind is Kind.FINAL
    assert runs.events("step_begin").count("step_begin:4") == 1


def test_killed_between_the_last_save_and_its_reservation_the_final_point_comes_once(
    runs: TrainerRuns, stub: StubService
) -> None:
    assert runs.launch(crash="after_save:4").returncode == -9
    assert stub.steps() == [0, 2]
    for _ in range(2):
        assert runs.launch().returncode == 0
    assert stub.steps() == [0, 2, 4]


def test_killed_between_publishing_and_handing_over_no_second_point_is_made(
    runs: TrainerRuns, stub: StubService
) -> None:
    assert runs.launch(crash="after_publish:4").returncode == -9
    reservation = stub.point(4).reservation
    assert stub.point(4).state is PointState.RESERVED
    stub.points = [point for point in stub.points if point.step != 4]  # the service lost it, say
    assert runs.launch().returncode == 0
    assert stub.steps() == [0, 2, 4]
    assert stub.point(4).reservation == reservation
    assert len(runs.snapshots()) == 2


def test_skip_eval_before_train_skips_that_and_nothing_else(runs: TrainerRuns, stub: StubService) -> None:
    assert runs.launch("eval.skip_eval_before_train=true").returncode == 0
    assert stub.steps() == [2, 4]


def test_drain_comes_before_teardown_after_an_exception(runs: TrainerRuns, stub: StubService) -> None:
    result = runs.launch(crash="in_step:3:raise")
    assert result.returncode == 1
    assert "injected fault" in result.stderr
    assert runs.events(*STEPS)[-5:] == [
        "step_begin:3",
        "exception",
        "drain_begin",
        "drain_end",
        "teardown",
    ]
    assert [planned.step for planned in stub.drains[0].planned] == [0, 2]


def test_drain_comes_before_teardown_after_sigterm(runs: TrainerRuns, stub: StubService) -> None:
    result = runs.launch(crash="in_step:3:term")
    assert result.returncode == 143, result.stderr
    assert runs.events("stopped", *STEPS)[-6:] == [
        "step_end:3",
        "stopped:3",
        "save:3",
        "drain_begin",
        "drain_end",
        "teardown",
    ]
    assert len(stub.drains) == 1


def test_a_failed_export_ends_its_point_and_training_goes_on(runs: TrainerRuns, stub: StubService) -> None:
    result = runs.launch(crash="in_export:2:raise")
    assert result.returncode == 0, result.stderr
    point = stub.point(2)
    assert (point.state, point.reason) == (PointState.SKIPPED, Reason.EXPORT_FAILED)
    assert "injected fault" in str(point.detail)
    assert stub.steps() == [0, 4]
    assert not list(runs.run_dir.glob(".partial-*"))


def test_service_down_at_dispatch_the_outbox_keeps_it_and_sends_it_later(runs: TrainerRuns, stub: StubService) -> None:
    dispatches = iter(range(100))

    def away(call: str) -> bool:  # gone as the snapshot of step 0 comes, back some calls later
        return call == "POST /dispatch" and next(dispatches) in range(1, 4)

    stub.away = away
    assert runs.launch().returncode == 0
    assert "eval_deferred:0" in runs.events("eval_deferred")
    assert sorted(stub.steps()) == [0, 2, 4]
    assert list(Outbox(runs.run_dir / "outbox").pending()) == []


def test_service_away_to_the_end_grants_itself_the_bound_and_the_forced_one(
    runs: TrainerRuns, stub: StubService
) -> None:
    stub.away = lambda _: True
    # The last export is to be over by then, however slow the disk is.
    settings = ("train.num_steps=6", "eval.interval=1", "eval.drain_timeout_s=5.0")
    result = runs.launch(*settings)
    assert result.returncode == 0, result.stderr
    kept = [request for _, request in Outbox(runs.run_dir / "outbox").pending()]
    assert [(request.step, request.force, request.deferred) for request in kept] == [
        (0, False, True),
        (1, False, True),
        (6, True, True),
    ]
    assert all(request.snapshot and Path(request.snapshot).is_dir() for request in kept)
    receipt = Receipt.model_validate_json((runs.run_dir / "outbox" / "receipt.json").read_bytes())
    assert not receipt.drained
    assert [point.step for point in receipt.deferred] == [0, 1, 6]
    assert [(point.step, point.reason) for point in receipt.skipped] == [(step, "busy") for step in (2, 3, 4, 5)]


def test_with_no_interval_the_service_is_never_called(runs: TrainerRuns, stub: StubService) -> None:
    result = runs.launch("eval.interval=none", "eval.suites=[]")
    assert result.returncode == 0, result.stderr
    assert "nothing is evaluated" in result.stdout
    assert stub.calls == []
    assert not runs.snapshots()


def test_a_run_that_the_service_refuses_is_refused_before_anything_is_trained(
    runs: TrainerRuns, stub: StubService
) -> None:
    result = runs.launch('eval.suites=["other"]')
    assert result.returncode == 2
    assert "suites: the service refuses the run: no suite other" in result.stderr
    assert not runs.events("step_begin")
