"""The process group and megatron's view of it.

Invariant: one rank, for now; more are refused by name. Everything else asks this module which rank it is, so that
tensor and pipeline parallelism come in here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]

from eval_service.contract.errors import ConfigError
from trainer import cpu_megatron
from trainer.mcore import parallel_state, tensor_parallel_random


def check_world() -> None:
    """Refuse a launch over several ranks.

    Raises:
        ConfigError: WORLD_SIZE is not 1.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    if world != "1":
        raise ConfigError(f"{world} ranks can't be trained yet", field="WORLD_SIZE", hint="start one process")


@contextmanager
def parallel_session(seed: int, threads: int | None) -> Iterator[None]:
    """Hold the process group (gloo on the CPU) and megatron's groups; both are ended on the way out."""
    check_world()
    cpu_megatron.install()
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
        if torch.cuda.is_available():
            tensor_parallel_random.model_parallel_cuda_manual_seed(seed)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


def is_rank_zero() -> bool:
    """Whether this process decides, logs and talks to the service."""
    return distributed.get_rank() == 0


def rank_label() -> str:
    """Names what of the model this rank holds: `tp00_pp00`."""
    tp = parallel_state.get_tensor_model_parallel_rank()
    pp = parallel_state.get_pipeline_model_parallel_rank()
    return f"tp{tp:02d}_pp{pp:02d}"
