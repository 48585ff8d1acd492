"""A model whose parameters and optimizer wait elsewhere between steps trains, saves and exports as any other.

There is no GPU here, so what is moved goes from one place of the host to another; it is moved all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from eval_service.contract.manifest import read_manifest
from trainer.architecture import read_architecture
from trainer.background import Background
from trainer.checkpoint import CheckpointStore
from trainer.config import ParallelSection, TrainSection
from trainer.data import Dataset, load_dataset
from trainer.export import Exporter
from trainer.parallel import Ranks, parallel_session
from trainer.saving import CheckpointWriter
from trainer.stager import Stager
from trainer.training import Training, build_training
from trainer.weights import ExportFailed

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """One process group for the module."""
    with parallel_session(ParallelSection(), seed=0, threads=1) as held:
        yield held


@pytest.fixture(scope="module")
def dataset(tiny_model_dir: Path, chats: Path) -> Dataset:
    """Batches of eight."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    return load_dataset(chats, tokenizer, max_length=64, seed=0, global_batch_size=8)


def build(tiny_model_dir: Path, ranks: Ranks, *, offload: bool, dtype: Any = "float32") -> Training:
    """A model at step 0, away if it is to be."""
    section = TrainSection(
        num_steps=4, lr=1e-3, global_batch_size=8, micro_batch_size=4, dtype=dtype, offload_train=offload
    )
    training = build_training(read_architecture(tiny_model_dir), tiny_model_dir, section, ranks)
    with training.here():
        pass
    return training


def device_bytes_of(training: Training) -> int:
    """What parameters, gradients and optimizer take now."""
    tensors = [param.data for param in training.model.ddp.parameters()]
    tensors += [buffer.grad_data for buffer in training.model.ddp.buffers]
    return sum(tensor.untyped_storage().size() for tensor in [*tensors, *training.optimizer.tensors()])


def exported(training: Training, tiny_model_dir: Path, root: Path, step: int) -> Path:
    """A snapshot of now."""
    exporter = Exporter(training.model, tiny_model_dir, here=training.here)
    return Stager(exporter, training.model.ranks.main, Background()).publish_now(root, "run", step).path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_checkpoints_and_exports_are_those_of_one_that_stays(
    tiny_model_dir: Path, ranks: Ranks, dataset: Dataset, tmp_path: Path, dtype: str
) -> None:
    staying = build(tiny_model_dir, ranks, offload=False, dtype=dtype)
    moving = build(tiny_model_dir, ranks, offload=True, dtype=dtype)
    for step in (1, 2, 3):
        assert device_bytes_of(moving) == 0
        assert moving.step(step, dataset) == staying.step(step, dataset)
        paths = [
            exported(each, tiny_model_dir, tmp_path / name, step) for each, name in ((staying, "a"), (moving, "b"))
        ]
        ours, theirs = (read_manifest(path) for path in paths)
        assert (ours.digest, ours.canary) == (theirs.digest, theirs.canary)
    writer = CheckpointWriter(CheckpointStore(tmp_path / "saved", "run"), ranks)
    writer.save(3, lambda: moving.state(3, {}))
    writer.finish()
    assert device_bytes_of(moving) == 0
    assert device_bytes_of(staying) > 0
    resumed = build(tiny_model_dir, ranks, offload=False, dtype=dtype)
    resumed.load(3, writer.store)
    assert resumed.step(4, dataset) == moving.step(4, dataset) == staying.step(4, dataset)


def test_an_export_that_fails_puts_the_weights_away_all_the_same(
    tiny_model_dir: Path, ranks: Ranks, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = build(tiny_model_dir, ranks, offload=True)
    training.step(1, dataset)
    exporter = Exporter(training.model, tiny_model_dir, here=training.here)
    stager = Stager(exporter, ranks.main, Background())
    with monkeypatch.context() as patched:
        patched.setattr(exporter.buffer, "copy", _no_memory)
        with pytest.raises(ExportFailed, match="out of memory"):
            stager.publish_now(tmp_path, "run", 1)
    assert device_bytes_of(training) == 0
    (tmp_path / "run").write_text("a file where the directory should be")
    with pytest.raises((ExportFailed, OSError)):
        stager.publish_now(tmp_path, "run", 1)
    assert device_bytes_of(training) == 0
    assert stager.publish_now(tmp_path / "elsewhere", "run", 1).path.is_dir()


def _no_memory(_: object) -> None:
    raise RuntimeError("out of memory")
