"""A rank's part of a checkpoint in megatron's sharded form: what is written, by whom, and how it is read back.

Invariants: each tensor is known by its global name, shape and offset, so another layout of ranks reads what it needs of
it. What is to be written is copied to the host first; after that, nothing here touches the device or the training
thread's process group, and a thread of its own can write. Megatron's own way to write behind forks the process, which
is unsafe once threads run, and keeps a helper that outlives a kill; so torch's writer does it, in the thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as write_shards

from trainer.arena import HostArena
from trainer.mcore import (
    AsyncRequest,
    AsyncSaveShardedStrategy,
    CheckpointingConfig,
    ShardedTensor,
    ShardedTensorFactory,
    StrictHandling,
    dist_checkpointing,
    is_main_replica,
    quiet,
    save_config,
    torch_strategy,
)
from trainer.parallel import Channel

Shards = dict[str, Any]
_FORMAT = CheckpointingConfig("torch_dist", 1)


class ShardsFailed(Exception):
    """Some rank could not write or read its part. (torch's own is no Exception, and would end a thread unheard.)"""


def model_shards(gpt: Any) -> Shards:
    """This rank's name to megatron's description of a parameter, whose `data` is the parameter itself."""
    with quiet():
        # One key a layer, so that uneven stages of another layout find theirs.
        found = gpt.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    return {name: shard for name, shard in found.items() if isinstance(shard, ShardedTensor | ShardedTensorFactory)}


class HostCopies:
    """Host memory for the copies of one checkpoint, the same for each: its pages are made, and pinned, but once.

    Invariant: what `of` returned is written before it is called again.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._arena = HostArena(pinned=self._on_gpu)

    @property
    def size_bytes(self) -> int:
        """Host memory that it holds."""
        return self._arena.size_bytes

    def reserve(self, sizes: Iterable[int]) -> None:
        """Have room for copies of so many bytes each; what is missing then is allocated later."""
        self._arena.clear()
        for size in sizes:
            self._arena.room(size)

    @torch.no_grad()
    def of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The same with copies of the tensors that this rank writes; when this returns, they may change."""
        self._arena.clear()
        copies = {name: self._copied(value) for name, value in state.items()}
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    def _copied(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._copied(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._copied(inner) for inner in value]
        if isinstance(value, torch.Tensor):
            return value.detach().to("cpu", copy=True)
        if isinstance(value, ShardedTensor | ShardedTensorFactory):
            data = value.data.detach()
            return replace(value, data=self._copy(data) if is_main_replica(value.replica_id) else data)
        return value

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        room = self._arena.room(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return room.copy_(tensor, non_blocking=True)


def begin_save(state: Shards, directory: Path, channel: Channel) -> Callable[[], None]:
    """Check the state over all ranks and write its common part; what is returned writes the rest, on `channel` alone.

    Args:
        state: in host memory that nobody changes any more; what is not sharded is the same on all ranks.
        directory: there, and empty.
    """
    with quiet():
        request = dist_checkpointing.save(state, str(directory), _InThread(channel), async_sharded_save=True)
    return partial(_run, request.async_fn)  # megatron's own finalisation would use the training thread's group


def _run(write: Callable[[], object]) -> None:
    try:
        write()
    except CheckpointException as exc:
        raise ShardsFailed(_first(exc)) from exc


def _first(exc: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {type(found[0]).__name__}: {found[0]}" for rank, found in exc.failures.items())


def end_save(directory: Path) -> None:
    """Mark a directory that every rank has written as whole."""
    save_config(_FORMAT, str(directory))


def load(state: Shards, directory: Path) -> dict[str, Any]:
    """Read what `state` describes, into its tensors where that can be; returns the same structure of plain tensors.

    Raises:
        ShardsFailed: some rank found a tensor of another shape. Beside it, what megatron and torch raise of files.
    """
    try:
        with quiet():
            loaded = dist_checkpointing.load(state, str(directory), strict=StrictHandling.RAISE_ALL)
    except CheckpointException as exc:
        raise ShardsFailed(_first(exc)) from exc
    return dict(loaded)


class _InThread(AsyncSaveShardedStrategy):
    """Megatron's `torch_dist` format, written by the caller of `async_fn`."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(_FORMAT.sharded_backend, _FORMAT.sharded_backend_version)
        self._channel = channel

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def async_save(self, sharded_state_dict: Shards, checkpoint_dir: str) -> Any:
        """Nothing here is collective, but for what the request does."""
        keyed, *_ = torch_strategy._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        write = partial(
            write_shards,
            torch_strategy.mcore_to_pyt_state_dict(keyed, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=torch_strategy.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self._channel.group,
        )
        return AsyncRequest(write, (), [])
