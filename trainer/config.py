"""`run.toml`: the trainer's own settings. Strict: unknown keys are errors, and what can't work is refused by name.

Relative paths are resolved against the file's directory, those given with `--set` too. This module needs no torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from eval_service.contract import names
from eval_service.contract.errors import ConfigError
from eval_service.contract.wire import OnTimeout, Overflow, RunName, Source, SuiteName
from trainer.launch import LaunchConfig, as_the_fleet_says

HINT = "see docs/configuration.md"
URL_VARIABLE = "EVALFLEET_URL"
_NO_ROLLOUTS = "there are no rollouts here to do alone; remove it. For evaluation alone, set train.num_steps = 0"
_NO_TRAINING_ALONE = "to train without any evaluation, unset eval.interval and eval.suites"
_WHY_NOT = {
    "debug_rollout_only": _NO_ROLLOUTS,
    "rollout_only": _NO_ROLLOUTS,
    "debug_eval_only": "for evaluation alone, set train.num_steps = 0",
    "eval_only": "for evaluation alone, set train.num_steps = 0",
    "debug_train_only": _NO_TRAINING_ALONE,
    "train_only": _NO_TRAINING_ALONE,
    "load_debug_rollout_data": "batches that were dumped with data.save_debug_data: see data.load_debug_data",
    "save_debug_rollout_data": "see data.save_debug_data",
    "load_debug_data": "it stands in [data]",
    "save_debug_data": "it stands in [data]",
}


def _http(url: str) -> str:
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
        raise ValueError("name the service's address, such as http://127.0.0.1:8700")
    return url


Url = Annotated[str, AfterValidator(_http)]


class Section(BaseModel):
    """The base of a config section."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    """`[run]`."""

    name: RunName
    root: Path = Field(description="snapshots go to <root>/<name>; inside the service's roots")
    output_dir: Path | None = Field(default=None, description="logs, plan, receipt; default <root>/<name>/trainer")


class ModelSection(Section):
    """`[model]`."""

    hf_path: Path = Field(description="Hugging Face directory of the base model")


class DataSection(Section):
    """`[data]`."""

    train: Path = Field(description='JSON lines of {"messages": [{"role": ..., "content": ...}, ...]}')
    max_length: int = Field(default=1024, ge=2, description="tokens; longer conversations are cut")
    packing: bool = Field(default=False, description="conversations share rows of up to `max_length` tokens")
    save_debug_data: Path | None = Field(default=None, description="directory that each step's batch is dumped to")
    load_debug_data: Path | None = Field(default=None, description="train on the batches that were dumped there")

    @model_validator(mode="after")
    def _dumped_once(self) -> Self:
        if self.load_debug_data is not None and self.save_debug_data is not None:
            raise ValueError("save_debug_data: what load_debug_data names is dumped already; remove one of them")
        return self


class TrainSection(Section):
    """`[train]`."""

    num_steps: int = Field(ge=0, description="optimizer steps; 0 trains nothing and evaluates the base model")
    global_batch_size: int = Field(default=64, ge=1, description="conversations a step")
    micro_batch_size: int = Field(default=64, ge=1, description="conversations a forward pass")
    lr: float = Field(default=1e-4, gt=0)
    min_lr: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    weight_decay: float = Field(default=0.0, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    clip_grad: float | None = Field(default=1.0, gt=0, description="norm; None: no clipping")
    seed: int = Field(default=0, ge=0)
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of parameters and activations; main parameters are always float32"
    )
    offload_train: bool = Field(
        default=False, description="parameters and optimizer wait on the host between steps; needs a GPU"
    )
    threads: int | None = Field(default=None, ge=1, description="of torch; None: as torch has it")
    save_interval: int | None = Field(default=None, ge=1, description="steps; None: the last step alone")
    keep_checkpoints: int | None = Field(default=None, ge=1, description="newest ones that are left; None: all")
    save_dir: Path | None = Field(default=None, description="default <output_dir>/checkpoints")
    save_hf: bool = Field(default=False, description="a Hugging Face directory beside each checkpoint")
    resume: bool = Field(default=True, description="from the latest checkpoint, where there is one")

    @model_validator(mode="before")
    @classmethod
    def _divisor(cls, table: Any) -> Any:
        """Nobody is told that what he did not set is wrong."""
        batch = table.get("global_batch_size") if isinstance(table, dict) else None
        if isinstance(batch, int) and batch > 0 and "micro_batch_size" not in table:
            return {**table, "micro_batch_size": math.gcd(batch, 64)}
        return table

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(f"micro_batch_size: {self.micro_batch_size} must divide global_batch_size")
        if self.min_lr > self.lr:
            raise ValueError("min_lr: must not be above lr")
        return self


class ParallelSection(Section):
    """`[parallel]`: how the model is cut over ranks; what is left over of the ranks is data parallel."""

    tensor: int = Field(default=1, ge=1, description="ranks that share each layer")
    pipeline: int = Field(default=1, ge=1, description="stages, one after another")
    data: int | None = Field(
        default=None, ge=1, description="replicas; None: what is left of the ranks, and 1 where nobody said how many"
    )
    sequence_parallel: bool = Field(default=False, description="cut the sequence too, between the layers")
    first_stage_layers: int | None = Field(default=None, ge=1, description="None: as many as the others")
    last_stage_layers: int | None = Field(default=None, ge=1, description="None: as many as the others")
    vocab_multiple: int = Field(default=1, ge=1, description="pad the vocabulary to a multiple of this and of `tensor`")
    recompute: bool = Field(default=False, description="activations are computed again in the backward pass")

    @property
    def ranks(self) -> int:
        """How many a launch starts."""
        return self.tensor * self.pipeline * (self.data or 1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("sequence_parallel: needs parallel.tensor > 1")
        if self.pipeline == 1 and (self.first_stage_layers or self.last_stage_layers):
            raise ValueError("first_stage_layers: and last_stage_layers need parallel.pipeline > 1")
        return self


class EvalSection(Section):
    """`[eval]`."""

    url: Url | None = Field(
        default=None, description=f"of the service; None: the variable {URL_VARIABLE}, if it is set"
    )
    token_file: Path | None = Field(
        default=None, description="whose first line is the service's token; None: EVALFLEET_TOKEN, if it is set"
    )
    interval: int | None = Field(default=None, ge=1, description="steps; None: nothing is ever evaluated")
    suites: tuple[SuiteName, ...] = ()
    snapshot_source: Literal[Source.STAGING, Source.REUSE] = Source.STAGING
    overflow: Overflow = Overflow.BACKPRESSURE
    max_in_flight: int = Field(default=2, ge=1, description="snapshots not settled")
    keep: int = Field(default=2, ge=0, description="settled snapshots that the service leaves")
    priority: int = 0
    max_engines: int | None = Field(default=None, ge=1)
    skip_eval_before_train: bool = False
    reserve_timeout_s: float = Field(default=600.0, ge=0, description="how long backpressure may hold a step")
    buffer: Literal["host", "device"] = Field(
        default="host",
        description="where the step's copy of the weights goes; `device` waits less and takes device memory too",
    )
    buffer_timeout_s: float = Field(
        default=60.0, ge=0, description="how long a step may wait for the last export to leave the buffer"
    )
    drain_timeout_s: float = Field(default=600.0, ge=0)
    on_timeout: OnTimeout = OnTimeout.LEAVE
    progress_interval_s: float = Field(
        default=10.0, gt=0, description="how often the service is told the step, for lag"
    )
    canary: bool = Field(default=True, description="log-probs of fixed sequences travel with each snapshot")

    @property
    def enabled(self) -> bool:
        """Whether anything is evaluated."""
        return self.interval is not None

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.interval is not None and not self.suites:
            raise ValueError("suites: an interval needs at least one suite")
        if self.interval is None and self.suites:
            raise ValueError("interval: suites are named, and nothing says when; set it, or remove the suites")
        if self.interval is not None and self.url is None:
            raise ValueError("url: an interval needs the service's address")
        return self


class Evaluated(Protocol):
    """What the eval side reads of a run's settings: `RunConfig`, or what another trainer's callback was given."""

    @property
    def run(self) -> RunSection:
        """Name and places."""

    @property
    def eval(self) -> EvalSection:
        """What is evaluated, and how long it may hold a step."""

    @property
    def num_steps(self) -> int | None:
        """The last step, where it is known."""

    @property
    def reuses(self) -> bool:
        """Points are made of own checkpoints rather than of exports."""


class RunConfig(Section):
    """The whole of `run.toml`; paths are absolute once it is loaded."""

    run: RunSection
    model: ModelSection
    data: DataSection
    train: TrainSection
    parallel: ParallelSection = ParallelSection()
    eval: EvalSection = EvalSection()
    fleet: LaunchConfig = LaunchConfig()

    @property
    def output_dir(self) -> Path:
        """Logs, plan, resolved config, receipt."""
        return self.run.output_dir or names.run_dir(self.run.root, self.run.name) / "trainer"

    @property
    def save_dir(self) -> Path:
        """Checkpoints."""
        return self.train.save_dir or self.output_dir / "checkpoints"

    @property
    def num_steps(self) -> int:
        """The last step."""
        return self.train.num_steps

    @property
    def reuses(self) -> bool:
        """Points are made of our own save_hf checkpoints."""
        return self.eval.enabled and self.eval.snapshot_source is Source.REUSE

    @model_validator(mode="after")
    def _reuse_has_saves(self) -> Self:
        interval, saves = self.eval.interval, self.train.save_interval
        if self.reuses and not self.train.save_hf:
            raise ValueError("train.save_hf: snapshot_source = 'reuse' needs it; set it to true")
        if self.reuses and interval is not None and (saves is None or interval % saves):
            raise ValueError(
                f"eval.interval: {interval} must be a multiple of train.save_interval ({saves}) to reuse saves"
            )
        if self.eval.enabled and self.data.load_debug_data is not None:
            raise ValueError(
                "data.load_debug_data: dumped batches reproduce a fault, and their curve would mean nothing; "
                "unset eval.interval and eval.suites"
            )
        if self.eval.enabled and self.train.offload_train and self.eval.buffer == "device":
            raise ValueError(
                "eval.buffer: 'device' keeps a copy of the weights where train.offload_train makes room for an engine; "
                "set it to 'host'"
            )
        if self.eval.enabled and not self.fleet.has_engines:
            raise ValueError("fleet.num_eval_engines: an interval needs engines; allow at least one")
        return self


def load_run(path: Path, overrides: Sequence[str] = (), fleet: Mapping[str, Any] | None = None) -> RunConfig:
    """Read and check a run file, after `section.key=value` overrides (TOML values, else strings).

    Args:
        fleet: what a launch knows of the fleet, as `[fleet]` has it.

    Raises:
        ConfigError: names the key and what is wrong with it.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"{path} can't be read: {exc}", hint=HINT) from exc
    for override in overrides:
        _override(table, override)
    _fill_in(table, fleet or {})
    config = _validated(table, path.name)
    return _absolute(config, path.resolve().parent)


def resolved_json(config: RunConfig) -> str:
    """The config as it is saved with the run: every default and derived path filled in."""
    table = config.model_dump(mode="json")
    table["run"]["output_dir"] = str(config.output_dir)
    table["train"]["save_dir"] = str(config.save_dir)
    return json.dumps(table, indent=1)


def _fill_in(table: dict[str, Any], fleet: Mapping[str, Any]) -> None:
    """What the file leaves to whoever launches it."""
    evaluation, stated = table.get("eval"), table.setdefault("fleet", {})
    if isinstance(evaluation, dict) and (url := os.environ.get(URL_VARIABLE)):
        evaluation.setdefault("url", url)
    if isinstance(stated, dict):
        table["fleet"] = as_the_fleet_says(stated, fleet)


def _override(table: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) != 2 or not all(parts):
        raise ConfigError(f"--set {override}: not understood", field="--set", hint="write section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    section = table.setdefault(parts[0], {})
    if not isinstance(section, dict):
        raise ConfigError(f"--set {override}: {parts[0]} is no section", field=parts[0], hint=HINT)
    if text == "none":
        section.pop(parts[1], None)
    else:
        section[parts[1]] = value


def _validated(table: dict[str, Any], name: str) -> RunConfig:
    try:
        return RunConfig.model_validate(table)
    except ValidationError as exc:
        fault = exc.errors()[0]
        key = ".".join(str(part) for part in fault["loc"])
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            hint = _WHY_NOT.get(key.rpartition(".")[2], f"remove it; {HINT}")
            raise ConfigError(f"{name}: unknown key", field=key, hint=hint) from exc
        if fault["type"] == "missing":
            raise ConfigError(f"{name}: is not set", field=key, hint=HINT) from exc
        if fault["type"] == "value_error" and (own := re.match(r"([a-z_.]+): ", message)):
            key, message = ".".join(filter(None, (key, own[1]))), message[own.end() :]
        raise ConfigError(f"{name}: {message}", field=key or None, hint=HINT) from exc


def _absolute(config: RunConfig, base: Path) -> RunConfig:
    def under(path: Path | None) -> Path | None:
        return (base / path).resolve() if path is not None else None

    run, data, train = config.run, config.data, config.train
    return config.model_copy(
        update={
            "run": run.model_copy(update={"root": under(run.root), "output_dir": under(run.output_dir)}),
            "model": ModelSection(hf_path=(base / config.model.hf_path).resolve()),
            "data": data.model_copy(
                update={
                    "train": under(data.train),
                    "save_debug_data": under(data.save_debug_data),
                    "load_debug_data": under(data.load_debug_data),
                }
            ),
            "train": train.model_copy(update={"save_dir": under(train.save_dir)}),
            "eval": config.eval.model_copy(update={"token_file": under(config.eval.token_file)}),
        }
    )
