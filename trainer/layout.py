"""Whether a model fits the layout of ranks, and what host memory each rank's export buffer takes.

Invariant: needs no process group, so a refusal comes before anything heavy is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eval_service.contract.errors import ConfigError
from trainer.architecture import Architecture
from trainer.config import RunConfig

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Stages:
    """Layers of each pipeline stage, in order."""

    layers: tuple[int, ...]


def check_layout(config: RunConfig, architecture: Architecture, world: int) -> Stages:
    """Hold the layout against model and batch.

    Raises:
        ConfigError: what does not divide, by name.
    """
    parallel, train = config.parallel, config.train
    tensor = parallel.tensor
    for what, size in (("key-value heads", architecture.num_kv_heads), ("MLP columns", architecture.ffn_size)):
        if size % tensor:
            raise ConfigError(f"{size} {what} don't divide by {tensor}", field="parallel.tensor", hint="take a divisor")
    data = world // (tensor * parallel.pipeline)
    if train.global_batch_size % (train.micro_batch_size * data):
        raise ConfigError(
            f"{train.global_batch_size} don't divide by {train.micro_batch_size} x {data} data-parallel ranks",
            field="train.global_batch_size",
            hint="take a multiple",
        )
    return _stages(config, architecture.num_layers)


def _stages(config: RunConfig, layers: int) -> Stages:
    parallel = config.parallel
    given = {0: parallel.first_stage_layers, parallel.pipeline - 1: parallel.last_stage_layers}
    fixed = {stage: count for stage, count in given.items() if count is not None}
    free = parallel.pipeline - len(fixed)
    left = layers - sum(fixed.values())
    if left < free or (left % free if free else left):
        raise ConfigError(
            f"{layers} layers can't be cut into {parallel.pipeline} stages so",
            field="parallel.pipeline",
            hint="set parallel.first_stage_layers or last_stage_layers so that the rest divides",
        )
    return Stages(tuple(fixed.get(stage, left // free if free else 0) for stage in range(parallel.pipeline)))


def buffer_bytes(config: RunConfig, architecture: Architecture, stages: Stages) -> int:
    """Host memory of the largest rank's export buffer; 0 where nothing is exported."""
    exports = config.train.save_hf or (config.eval.enabled and not config.reuses)
    return ITEM_BYTES[architecture.dtype] * _largest_part(config, architecture, stages) if exports else 0


def checkpoint_bytes(config: RunConfig, architecture: Architecture, stages: Stages) -> int:
    """Host memory of the largest copy of a checkpoint: parameters, float32 main ones beside bfloat16, two moments."""
    item = 12 if config.train.dtype == "float32" else ITEM_BYTES[config.train.dtype] + 12
    return item * _largest_part(config, architecture, stages)


def _largest_part(config: RunConfig, architecture: Architecture, stages: Stages) -> int:
    """Parameters of the rank that has most of them."""
    a, tensor = architecture, config.parallel.tensor
    width = a.head_dim * (2 * a.num_heads + 2 * a.num_kv_heads)
    layer = a.hidden_size * (width + 3 * a.ffn_size) // tensor + 2 * a.hidden_size + 2 * a.head_dim
    rows = -(-a.vocab_size * a.hidden_size // tensor)
    ends = [0] * len(stages.layers)
    ends[0] += rows
    ends[-1] += a.hidden_size + (0 if a.tied else rows)
    return max(layer * n + end for n, end in zip(stages.layers, ends, strict=True))


def check_memory(needed_bytes: int, ranks_here: int) -> None:
    """Refuse buffers that don't fit this node's free memory.

    Raises:
        ConfigError: says what they need and what there is.
    """
    free = free_memory_bytes()
    if free is not None and needed_bytes * ranks_here > free:
        raise ConfigError(
            f"the export buffers need {megabytes(needed_bytes)} of host memory on each of {ranks_here} ranks here; "
            f"{megabytes(free)} are free",
            field="eval.snapshot_source",
            hint="free memory, spread the model over more ranks (parallel.tensor), or turn evaluation and save_hf off",
        )


def check_checkpoint_memory(copy_bytes: int, copies_here: int, held_bytes: int) -> None:
    """Refuse checkpoints whose copies, beside what else is held, don't fit this node's free memory.

    Args:
        copies_here: how many copies of a model's part the ranks of this node make; data-parallel ones share theirs.
        held_bytes: of export buffers, and of what waits on the host between steps.

    Raises:
        ConfigError: says what they need and what there is.
    """
    free = free_memory_bytes()
    if free is not None and copy_bytes * copies_here + held_bytes > free:
        raise ConfigError(
            f"a checkpoint is copied to host memory: {megabytes(copy_bytes)} on each of {copies_here} ranks here, "
            f"beside {megabytes(held_bytes)} for exports and offloading; {megabytes(free)} are free",
            field="train.save_dir",
            hint="free memory, or spread the model over more ranks (parallel.tensor, parallel.pipeline)",
        )


def free_memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """What could be allocated on this node, within this process's control group; None: it can't be known."""
    found = [value for value in (_available(meminfo), _left_of_group(cgroup)) if value is not None]
    return min(found, default=None)


def megabytes(size: int) -> str:
    """For people."""
    return f"{size / 1e6:,.0f} MB"


def _available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _left_of_group(cgroup: Path) -> int | None:
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return None if limit == "max" else max(0, int(limit) - int(used))
    except (OSError, ValueError):
        return None
