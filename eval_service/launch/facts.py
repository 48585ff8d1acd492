"""What a launch must know of the run. The trainer is asked, as a process: it alone reads and judges `run.toml`.

Invariants: nothing here touches a GPU (the process sees none), Ray or the network; whatever the trainer would refuse is
refused here, with its own words.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from eval_service.contract.errors import ConfigError, ErrorEnvelope
from eval_service.contract.wire import Kind, OnTimeout
from eval_service.fleet_config import EVAL_GROUP, FleetConfig
from eval_service.launch.processes import environment

TRAINER = "trainer.main"
TIMEOUT_S = 600.0  # it reads and tokenizes the whole of the training data


class PlannedStep(BaseModel):
    """A step that is evaluated."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    kind: Kind
    force: bool


class RunFacts(BaseModel):
    """The trainer's answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    root: Path
    output_dir: Path
    tensor: int
    pipeline: int
    data: int
    ranks: int
    starts_inference_engines: bool
    has_engines: bool
    allow_shared_gpu: bool
    evaluates: bool
    url: str | None
    suites: tuple[str, ...]
    drain_timeout_s: float
    on_timeout: OnTimeout
    start: int | None
    num_steps: int
    points: tuple[PlannedStep, ...]
    plan: str
    buffer_bytes: int


def trainer_arguments(config: Path, settings: Sequence[str], fleet: FleetConfig | None) -> list[str]:
    """The trainer's own command line, the same for its plan and for the run."""
    told = [part for setting in settings for part in ("--set", setting)]
    return ["--config", str(config), *told, "--fleet", json.dumps(_told_of(fleet))]


def ask_trainer(arguments: Sequence[str], url: str | None) -> RunFacts:
    """Let the trainer check its settings and say what it needs.

    Args:
        url: where the service is going to be; the run may name no other.

    Raises:
        ConfigError: what the trainer refuses, or that there is no trainer here.
    """
    command = [sys.executable, "-m", TRAINER, *arguments, "--plan", "--json"]
    blind = {"CUDA_VISIBLE_DEVICES": "", "EVALFLEET_URL": url or ""}
    env = {name: value for name, value in environment().items() if name not in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    try:
        done = subprocess.run(
            command,
            env=env | blind,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise ConfigError(f"the trainer made no plan within {TIMEOUT_S:.0f} s", field="--config") from exc
    answer = (done.stdout.strip().splitlines() or [""])[-1]
    try:
        if done.returncode == 0:
            return RunFacts.model_validate_json(answer)
        error = ErrorEnvelope.model_validate_json(answer).error
    except ValidationError as exc:
        told = " | ".join(done.stderr.strip().splitlines()[-2:])
        hint = "evalfleet launch needs the trainer beside the service: pip install 'evalfleet[trainer]'"
        raise ConfigError(f"the trainer can't make its plan: {told}", field="--config", hint=hint) from exc
    raise ConfigError(error.message, field=error.field, hint=error.hint)


def _told_of(fleet: FleetConfig | None) -> dict[str, object]:
    """What the run is told of the fleet; with none, nothing is started."""
    if fleet is None:
        return {"num_eval_engines": 0}
    attached = sum(len(group.urls) for group in fleet.groups.values() if group.kind == "attached")
    least, most = fleet.groups[EVAL_GROUP].bounds
    return {"num_eval_engines": [least, most], "num_attached_engines": attached}
