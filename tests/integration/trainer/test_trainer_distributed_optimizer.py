"""The optimizer of GPUs, megatron's distributed one, with the CPU as its device: its checkpoints are resumed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.distributed_on_cpu import distributed_on_cpu
from trainer.architecture import read_architecture
from trainer.checkpoint import CheckpointStore
from trainer.config import ParallelSection, TrainSection
from trainer.data import load_dataset
from trainer.parallel import Ranks, parallel_session
from trainer.saving import CheckpointWriter
from trainer.training import Training, build_training

pytestmark = pytest.mark.real


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """One rank, whose CPU passes for a GPU to megatron's optimizer."""
    with parallel_session(ParallelSection(), seed=0, threads=1) as held, distributed_on_cpu():
        yield held


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_has_the_losses_of_one_never_interrupted(
    ranks: Ranks, tiny_model_dir: Path, chats: Path, tmp_path: Path, dtype: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    dataset = load_dataset(chats, tokenizer, max_length=64, seed=0, global_batch_size=8)
    whole, resumed = (build(tiny_model_dir, ranks, dtype) for _ in range(2))
    writer = CheckpointWriter(CheckpointStore(tmp_path, "run"), ranks)
    whole.reserve()
    reserved = whole.copies.size_bytes
    for step in (1, 2):
        whole.step(step, dataset)
        writer.save(step, partial(whole.state, step, {}))
    writer.finish()
    assert whole.copies.size_bytes == reserved > 0
    resumed.load(2, writer.store)
    for step in (3, 4):
        assert resumed.step(step, dataset) == whole.step(step, dataset)


def build(directory: Path, ranks: Ranks, dtype: Any) -> Training:
    """At step 0, its optimizer away between steps."""
    section = TrainSection(
        num_steps=4, lr=1e-3, global_batch_size=8, micro_batch_size=4, dtype=dtype, offload_train=True
    )
    return build_training(read_architecture(directory), directory, section, ranks)
