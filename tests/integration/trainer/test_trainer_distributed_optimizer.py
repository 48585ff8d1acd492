"""The optimizer of GPUs, megatron's distributed one, with the CPU as its device: its checkpoints are resumed.

It asks for CUDA by name wherever it makes a tensor, and takes none of another kind; here it is told that these are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from trainer import model as trainer_model
from trainer import optim, training
from trainer.architecture import read_architecture
from trainer.checkpoint import CheckpointStore
from trainer.config import ParallelSection, TrainSection
from trainer.cpu_megatron import _TorchOnCpu
from trainer.data import load_dataset
from trainer.mcore import DistributedDataParallelConfig
from trainer.parallel import Ranks, parallel_session
from trainer.saving import CheckpointWriter
from trainer.training import Training, build_training

pytestmark = pytest.mark.real
KINDS = {torch.float32: "torch.cuda.FloatTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}


class Torch(_TorchOnCpu):
    """As the trainer's stand-in, for more of torch's factories."""

    def tensor(self, data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        """On the CPU."""
        return torch.tensor(data, **options)

    def empty(self, *size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        """On the CPU."""
        return torch.empty(*size, **options)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """One rank, whose CPU passes for a GPU to megatron's optimizer."""
    with parallel_session(ParallelSection(), seed=0, threads=1) as held:
        for name in ("optimizer.distrib_optimizer", "optimizer.optimizer", "optimizer.clip_grads", "utils"):
            monkeypatch.setitem(sys.modules[f"megatron.core.{name}"].__dict__, "torch", Torch())
        kind = torch.Tensor.type
        monkeypatch.setattr(
            torch.Tensor, "type", lambda tensor, *args: kind(tensor, *args) if args else KINDS[tensor.dtype]
        )
        config = DistributedDataParallelConfig
        monkeypatch.setattr(
            trainer_model,
            "DistributedDataParallelConfig",
            lambda **options: config(**{**options, "use_distributed_optimizer": True}),
        )
        monkeypatch.setattr(training, "build_optimizer", optim.MegatronOptimizer)
        yield held


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_has_the_losses_of_one_never_interrupted(
    ranks: Ranks, tiny_model_dir: Path, chats: Path, tmp_path: Path, dtype: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    dataset = load_dataset(chats, tokenizer, max_length=64, seed=0, global_batch_size=8)
    whole, resumed = (build(tiny_model_dir, ranks, dtype) for _ in range(2))
    writer = CheckpointWriter(CheckpointStore(tmp_path, "run"), ranks)
    for step in (1, 2):
        whole.step(step, dataset)
    with whole.here():
        state = whole.state(2, {})
    writer.save(2, state)
    writer.finish()
    resumed.load(2, writer.store)
    for step in (3, 4):
        assert resumed.step(step, dataset) == whole.step(step, dataset)


def build(directory: Path, ranks: Ranks, dtype: Any) -> Training:
    """At step 0, its optimizer away between steps."""
    section = TrainSection(
        num_steps=4, lr=1e-3, global_batch_size=8, micro_batch_size=4, dtype=dtype, offload_train=True
    )
    return build_training(read_architecture(directory), directory, section, ranks)
