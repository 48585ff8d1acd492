"""The optimizer of GPUs, megatron's distributed one, with the CPU as its device.

It asks for CUDA by name wherever it makes a tensor, and takes none of another kind; here it is told that these are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from trainer import model as trainer_model
from trainer import optim, training
from trainer.cpu_megatron import _TorchOnCpu

KINDS = {torch.float32: "torch.cuda.FloatTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}
_MODULES = ("optimizer.distrib_optimizer", "optimizer.optimizer", "optimizer.clip_grads", "utils")


class Torch(_TorchOnCpu):
    """As the trainer's stand-in, for more of torch's factories."""

    def tensor(self, data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        """On the CPU."""
        return torch.tensor(data, **options)

    def empty(self, *size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        """On the CPU."""
        return torch.empty(*size, **options)


@contextmanager
def distributed_on_cpu() -> Iterator[None]:
    """Within a parallel session: what is built meanwhile trains with it, and is used meanwhile alone."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _MODULES:
            patch.setitem(sys.modules[f"megatron.core.{name}"].__dict__, "torch", Torch())
        kind = torch.Tensor.type
        patch.setattr(torch.Tensor, "type", lambda tensor, *args: kind(tensor, *args) if args else KINDS[tensor.dtype])
        config = vars(trainer_model)["DistributedDataParallelConfig"]
        patch.setattr(
            trainer_model,
            "DistributedDataParallelConfig",
            lambda **options: config(**{**options, "use_distributed_optimizer": True}),
        )
        patch.setattr(training, "build_optimizer", optim.MegatronOptimizer)
        yield
