"""The process group, megatron's view of it, and what the ranks agree on beside it.

Invariants: who is which rank is asked here and nowhere else. A `Channel` is for host values and host memory, over gloo,
also where training runs on NCCL; each has a group of its own, and one thread alone uses it, so that what the exporter
sends in the background never meets what the training step sends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]

from eval_service.contract.errors import ConfigError
from trainer import cpu_megatron
from trainer.config import ParallelSection
from trainer.mcore import parallel_state, tensor_parallel_random

_Value = TypeVar("_Value")
TIMEOUT = timedelta(minutes=30)


def world_size() -> int:
    """How many ranks this launch has, before any process group exists."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """Which rank this process is, before any process group exists."""
    return int(os.environ.get("RANK", "0"))


def check_world(config: ParallelSection) -> None:
    """Hold the number of ranks against the layout.

    Raises:
        ConfigError: the ranks don't divide by tensor x pipeline.
    """
    needed = config.tensor * config.pipeline
    if config.data is not None and world_size() != config.ranks:
        raise ConfigError(
            f"{world_size()} ranks are not tensor x pipeline x data = {config.ranks}",
            field="parallel.data",
            hint=f"start {config.ranks} with torchrun --nproc-per-node (evalfleet launch does), or leave it out",
        )
    if world_size() % needed:
        raise ConfigError(
            f"{world_size()} ranks don't divide by tensor x pipeline = {needed}",
            field="parallel",
            hint=f"start a multiple of {needed} with torchrun --nproc-per-node, or change parallel.tensor or .pipeline",
        )


@dataclass(frozen=True, slots=True)
class Channel:
    """Agreement of all ranks over host values. Every method but `send` and `receive` is collective."""

    group: Any
    rank: int = 0
    world: int = 1

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, everywhere."""
        if self.world == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather(self, value: _Value) -> list[_Value]:
        """Every rank's value, by rank, everywhere."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def all(self, flag: bool) -> bool:
        """Whether it is true on every rank."""
        return all(self.gather(flag))

    def any(self, flag: bool) -> bool:
        """Whether it is true on some rank."""
        return flag if self.world == 1 else bool(self.sum(torch.tensor([int(flag)])).item())

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place, of a host tensor."""
        if self.world > 1:
            distributed.all_reduce(tensor, group=self.group)
        return tensor

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a contiguous host tensor to a rank that receives it."""
        distributed.send(tensor, to, group=self.group)

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Fill a contiguous host tensor with what a rank sends."""
        distributed.recv(tensor, source, group=self.group)
        return tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the others. `main` is the training thread's channel, `export` and `save` those of the threads
    that write snapshots and checkpoints. What holds on to the groups is let go of by `closing` when they end."""

    main: Channel
    export: Channel
    save: Channel
    device: torch.device
    closing: ExitStack

    @property
    def leads(self) -> bool:
        """It decides, logs and talks to the service."""
        return self.main.rank == 0


@contextmanager
def parallel_session(config: ParallelSection, *, seed: int, threads: int | None) -> Iterator[Ranks]:
    """Hold the process group (gloo on the CPU) and megatron's groups; all are ended on the way out."""
    check_world(config)
    cpu_megatron.install()
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    device = _device()
    _init_process_group("gloo" if device.type == "cpu" else "nccl")
    try:
        with _megatron(config, seed, device), ExitStack() as closing:
            yield Ranks(_channel(), _channel(), _channel(), device, closing)
    finally:
        distributed.destroy_process_group()


@contextmanager
def _megatron(config: ParallelSection, seed: int, device: torch.device) -> Iterator[None]:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor, pipeline_model_parallel_size=config.pipeline
    )
    try:
        if device.type == "cuda":
            tensor_parallel_random.model_parallel_cuda_manual_seed(seed)
        yield
    finally:
        parallel_state.destroy_model_parallel()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _init_process_group(backend: str) -> None:
    if world_size() == 1:
        distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    else:
        distributed.init_process_group(backend, timeout=TIMEOUT)


def _channel() -> Channel:
    group = distributed.new_group(backend="gloo", timeout=TIMEOUT)
    return Channel(group, distributed.get_rank(), distributed.get_world_size())


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank stands in the layout."""

    tensor: int
    tensor_world: int
    data: int
    data_world: int
    first_stage: bool
    last_stage: bool

    @classmethod
    def here(cls) -> Place:
        """Ask megatron."""
        return cls(
            tensor=parallel_state.get_tensor_model_parallel_rank(),
            tensor_world=parallel_state.get_tensor_model_parallel_world_size(),
            data=parallel_state.get_data_parallel_rank(),
            data_world=parallel_state.get_data_parallel_world_size(),
            first_stage=parallel_state.is_pipeline_first_stage(),
            last_stage=parallel_state.is_pipeline_last_stage(),
        )


def share_of(items: Sequence[_Value], place: Place) -> Sequence[_Value]:
    """A data-parallel rank's share of a batch: consecutive items, the same number for each."""
    each = len(items) // place.data_world
    return items[place.data * each : (place.data + 1) * each]
