"""Who gets which GPU of this host, as a pure function: the trainer's ranks first, the engines after them.

Invariants: where no engine starts (`starts_inference_engines`), nothing is reserved for one; no GPU is given to two,
unless the run allows it and the engines are told their share of its memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval_service.contract.errors import ConfigError
from eval_service.fleet_config import FleetConfig, GroupConfig
from eval_service.launch.facts import RunFacts

VISIBLE = "CUDA_VISIBLE_DEVICES"
MEMORY_FRACTION = "mem_fraction_static"
_DEVICE = re.compile(r"nvidia\d+")


@dataclass(frozen=True, slots=True)
class EngineSlot:
    """Room for one engine: its group, its number in it from 0, and its GPUs (none on the CPU)."""

    group: str
    number: int
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """GPUs by their ids, as CUDA_VISIBLE_DEVICES has them; `ranks[i]` is None for a rank on the CPU."""

    host: tuple[str, ...]
    ranks: tuple[str | None, ...]
    engines: tuple[EngineSlot, ...]

    @property
    def trainer_gpus(self) -> tuple[str, ...]:
        """What the trainer's ranks see, in order."""
        return tuple(gpu for gpu in self.ranks if gpu is not None)

    @property
    def fleet_gpus(self) -> tuple[str, ...]:
        """What Ray and its replicas see, in order."""
        return tuple(gpu for slot in self.engines for gpu in slot.gpus)

    @property
    def shared(self) -> tuple[str, ...]:
        """GPUs that both have."""
        return tuple(gpu for gpu in self.trainer_gpus if gpu in self.fleet_gpus)


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """The ids of this host's GPUs, without touching one: what the environment allows, else the device files."""
    if (allowed := environ.get(VISIBLE)) is not None:
        return tuple(part.strip() for part in allowed.split(",") if part.strip() not in ("", "-1", "NoDevFiles"))
    try:
        count = sum(1 for name in os.listdir(devices) if _DEVICE.fullmatch(name))
    except OSError:
        count = 0
    return tuple(str(number) for number in range(count))


def lay_out(facts: RunFacts, fleet: FleetConfig | None, host: Sequence[str]) -> Layout:
    """Give the host's GPUs out.

    Raises:
        ConfigError: there are too few, or one would be shared that may not be.
    """
    starts = fleet is not None and facts.starts_inference_engines
    needed = (
        [(name, group, _gpus_each(group, on_gpus=bool(host))) for name, group in fleet.groups.items()]
        if fleet and starts
        else []
    )
    if not host:
        _refuse_gpu_engines(needed)
    if fleet and not starts and facts.has_engines:
        _refuse_others(fleet)
    total = sum(each * group.bounds[1] for _, group, each in needed)
    first = _first_of_fleet(facts, needed, total, len(host))
    ranks = tuple(host[: facts.ranks]) if host else (None,) * facts.ranks
    return Layout(tuple(host), ranks, tuple(_slots(needed, iter(host[first:]))))


_Need = tuple[str, GroupConfig, int]  # a group's name, itself, and the GPUs of one of its engines


def _gpus_each(group: GroupConfig, *, on_gpus: bool) -> int:
    on_cpu = group.grade in ("sglang-cpu", "fake") or (group.grade == "auto" and not on_gpus)
    return 0 if group.kind == "attached" or on_cpu else group.num_gpus_per_engine


def _refuse_others(fleet: FleetConfig) -> None:
    """Attached engines evaluate, and none is to be started; then no other group may start any either."""
    for name, group in fleet.groups.items():
        if group.kind != "attached" and group.bounds[1]:
            raise ConfigError(
                "the eval group has no engines, so none is started, and this group asks for some",
                field=f"groups.{name}.num_engines",
                hint="set it to 0, or let groups.eval.num_engines allow one",
            )


def _refuse_gpu_engines(needed: Iterable[_Need]) -> None:
    for name, _, each in needed:
        if each:
            raise ConfigError(
                "GPU engines, and this host has no GPU",
                field=f"groups.{name}.grade",
                hint="use grade = 'auto' or 'sglang-cpu', or say --gpus if the host has some that can't be seen",
            )


def _first_of_fleet(facts: RunFacts, needed: Sequence[_Need], total: int, host: int) -> int:
    """Where the fleet's GPUs begin: after the trainer's, or so early that they end with the host's last one."""
    if host and facts.ranks > host:
        raise ConfigError(
            f"{facts.ranks} ranks (tensor {facts.tensor} x pipeline {facts.pipeline} x data {facts.data}) need a GPU "
            f"each, and this host has {host}",
            field="parallel",
            hint="lower parallel.tensor, .pipeline or .data; --gpus 0 trains on the CPU",
        )
    if facts.ranks + total <= host or not total:
        return facts.ranks
    told = f"the trainer takes {facts.ranks} GPUs and the fleet {total}, and this host has {host}"
    if total > host:
        raise ConfigError(told, field="num_gpus", hint="lower groups.eval.num_engines or num_gpus_per_engine")
    if not facts.allow_shared_gpu:
        hint = "set it to true together with the engines' overrides.mem_fraction_static, or lower num_engines"
        raise ConfigError(f"{told}: they would share", field="fleet.allow_shared_gpu", hint=hint)
    return host - total


def refuse_greed(layout: Layout, fleet: FleetConfig | None) -> None:
    """Where a GPU is shared, see that its engines leave some of its memory to the trainer.

    Raises:
        ConfigError: a group has no memory fraction.
    """
    if fleet is None or not layout.shared:
        return
    for slot in layout.engines:
        group = fleet.groups[slot.group]
        keys = {key.replace("-", "_") for key in (*fleet.overrides, *group.overrides)}
        if set(slot.gpus) & set(layout.shared) and group.kind != "placeholder" and MEMORY_FRACTION not in keys:
            raise ConfigError(
                f"GPU {layout.shared[0]} is shared with the trainer, and the engines would take nearly all of it",
                field=f"groups.{slot.group}.overrides.{MEMORY_FRACTION}",
                hint=f"say how much they may have, such as overrides = {{ {MEMORY_FRACTION} = 0.3 }}",
            )


def _slots(needed: Iterable[_Need], free: Iterable[str]) -> Iterable[EngineSlot]:
    left = iter(free)
    for name, group, each in needed:
        if group.kind != "attached":
            for number in range(group.bounds[1]):
                yield EngineSlot(name, number, tuple(next(left) for _ in range(each)))
