"""What a launch is going to do, made and checked from the three files; for people and for programs.

Invariant: making a plan starts no service, touches no GPU and no network, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval_service.contract.errors import ConfigError
from eval_service.fleet_config import FleetConfig, load_fleet
from eval_service.launch.facts import RunFacts, ask_trainer, trainer_arguments
from eval_service.launch.layout import Layout, lay_out, refuse_greed
from eval_service.serve.settings import check_places
from eval_service.suites.suite import load_suites

_ANY_HOST = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command was given. `fleet` and `suites` None: the files beside the run's, if they are there."""

    config: Path
    fleet: Path | None = None
    suites: Path | None = None
    settings: tuple[str, ...] = ()
    port: int | None = None
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Service:
    """The service that is to be started, and where."""

    fleet_path: Path
    suites_path: Path
    fleet: FleetConfig
    host: str
    port: int

    @property
    def url(self) -> str:
        """As the trainer reaches it; port 0 is one that is not known yet."""
        return f"http://{'127.0.0.1' if self.host in _ANY_HOST else self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything that is known before anything is started. `service` None: there is none to start."""

    facts: RunFacts
    layout: Layout
    service: Service | None
    trainer: tuple[str, ...]

    @property
    def shares(self) -> bool:
        """Some GPU is the trainer's and the fleet's."""
        return bool(self.layout.shared)


def make_plan(asked: Asked, ask: Callable[[Sequence[str], str | None], RunFacts] = ask_trainer) -> LaunchPlan:
    """Read the files, ask the trainer, and lay the GPUs out.

    Args:
        ask: gives what the trainer says to its arguments and the service's address.

    Raises:
        ConfigError: names what can't work.
    """
    service = _service(asked)
    fleet = service.fleet if service else None
    arguments = trainer_arguments(asked.config, asked.settings, fleet)
    facts = _facts(ask, arguments, service)
    if service is not None:
        _check_together(facts, service)
    layout = lay_out(facts, fleet, asked.gpus)
    refuse_greed(layout, fleet)
    return LaunchPlan(facts, layout, service if facts.has_engines else None, tuple(arguments))


def as_text(plan: LaunchPlan) -> str:
    """The layout and the points, a line each."""
    facts = plan.facts
    cut = f"tensor {facts.tensor} x pipeline {facts.pipeline} x data {facts.data}"
    begin = "fresh run" if facts.start is None else f"resumes from step {facts.start}"
    lines = [
        f"run {facts.run}: {begin}; trains to step {facts.num_steps}",
        f"trainer: {_count(facts.ranks, 'rank')} ({cut}), {_visible(plan.layout.trainer_gpus)}",
        *(f"  rank {rank}: {_place(() if gpu is None else (gpu,))}" for rank, gpu in enumerate(plan.layout.ranks)),
    ]
    if facts.buffer_bytes:
        lines.append(f"  export buffer: {facts.buffer_bytes / 1e6:,.0f} MB of host memory on each rank")
    if plan.service is None:
        lines.append("service: none; no engine starts, and nothing is reserved for one")
    else:
        lines.append(f"service: {plan.service.url}, {_visible(plan.layout.fleet_gpus)}")
        lines += [f"  engine {slot.group}/{slot.number}: {_place(slot.gpus)}" for slot in plan.layout.engines]
    if plan.shares:
        lines.append(f"shared: {_place(plan.layout.shared)}")
    return "\n".join([*lines, f"plan: {facts.plan}"])


def as_json(plan: LaunchPlan) -> dict[str, Any]:
    """The same for programs."""
    facts, layout = plan.facts, plan.layout
    engines = [{"group": slot.group, "number": slot.number, "gpus": list(slot.gpus)} for slot in layout.engines]
    return {
        "run": facts.run,
        "start": facts.start,
        "num_steps": facts.num_steps,
        "gpus": list(layout.host),
        "shared_gpus": list(layout.shared),
        "trainer": {
            "tensor": facts.tensor,
            "pipeline": facts.pipeline,
            "data": facts.data,
            "ranks": [{"rank": rank, "gpu": gpu} for rank, gpu in enumerate(layout.ranks)],
            "cuda_visible_devices": ",".join(layout.trainer_gpus),
            "buffer_bytes": facts.buffer_bytes,
        },
        "service": None
        if plan.service is None
        else {
            "url": plan.service.url,
            "engines": engines,
            "cuda_visible_devices": ",".join(layout.fleet_gpus),
        },
        "points": [point.model_dump(mode="json") for point in facts.points],
        "plan": facts.plan,
    }


def _service(asked: Asked) -> Service | None:
    fleet_path = _beside(asked.config, asked.fleet, "fleet.toml")
    suites_path = _beside(asked.config, asked.suites, "suites.toml")
    if fleet_path is None:
        return None
    fleet = load_fleet(fleet_path)
    if suites_path is None:
        hint = "name it, or put it beside the run file"
        raise ConfigError("there is a fleet.toml and no suites.toml", field="--suites", hint=hint)
    port = fleet.service.port if asked.port is None else asked.port
    return Service(fleet_path, suites_path, fleet, fleet.service.host, port)


def _beside(config: Path, given: Path | None, name: str) -> Path | None:
    if given is not None:
        return given.resolve()
    path = config.resolve().parent / name
    return path if path.is_file() else None


def _facts(
    ask: Callable[[Sequence[str], str | None], RunFacts], arguments: Sequence[str], service: Service | None
) -> RunFacts:
    try:
        return ask(arguments, service.url if service else None)
    except ConfigError as exc:
        if service is None and exc.field in ("fleet.num_eval_engines", "eval.url"):
            hint = "name it with --fleet, or unset eval.interval and eval.suites"
            raise ConfigError(
                "the run asks for engines, and no fleet.toml lies beside its file", field="--fleet", hint=hint
            ) from exc
        raise


def _check_together(facts: RunFacts, service: Service) -> None:
    """What each file may say, and the three together may not."""
    check_places(service.fleet)
    suites = load_suites(service.suites_path)
    if strange := [name for name in facts.suites if name not in suites]:
        there = ", ".join(sorted(suites))
        raise ConfigError(
            f"there is no suite {strange[0]!r} in {service.suites_path.name}",
            field="eval.suites",
            hint=f"there are {there}",
        )
    if facts.evaluates and not any(facts.root.is_relative_to(root) for root in service.fleet.service.roots):
        raise ConfigError(
            f"{facts.root} lies in none of the service's roots",
            field="run.root",
            hint="move it, or add it to service.roots in fleet.toml",
        )
    if facts.evaluates and facts.url is not None and _plain(facts.url) != _plain(service.url):
        raise ConfigError(
            f"the run names {facts.url}, and the service is started at {service.url}",
            field="eval.url",
            hint="leave it out: the launch tells the trainer where the service is",
        )


def _plain(url: str) -> str:
    return url.rstrip("/").replace("//localhost", "//127.0.0.1")


def _visible(gpus: Sequence[str]) -> str:
    return f"CUDA_VISIBLE_DEVICES={','.join(gpus)}" if gpus else "CUDA_VISIBLE_DEVICES is empty"


def _place(gpus: Sequence[str]) -> str:
    return f"GPU {', '.join(gpus)}" if gpus else "CPU"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
