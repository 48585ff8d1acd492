"""Suites that others define: lm-evaluation-harness tasks, and checkpoint eval functions. As written, and as loaded.

Both run in a process of their own; what can be known of them without running them is checked when they are loaded.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import xxhash
from pydantic import Field, field_validator, model_validator

from eval_service.contract.errors import ConfigError
from eval_service.contract.results import Direction
from eval_service.contract.wire import SuiteName
from eval_service.fleet_config import Section
from eval_service.secrets_apart import without_secrets
from eval_service.suites.sources import digest_of, module_beside

_IMPORT_S = 60.0
_SEED_END = 2**32  # numpy's
_SEEDED = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
_SEEDS = (0, 1234, 1234, 1234)  # lm-eval's own
_TASK = re.compile(r"^(?:task|group|tag):[ \t]*[\"']?([\w.\-]+)[\"']?[ \t]*(?:#.*)?$", re.MULTILINE)

Seed = Annotated[int, Field(ge=0, lt=_SEED_END)]


class LmEvalConfig(Section):
    """`[suites.NAME]` with `kind = "lm_eval"`."""

    kind: Literal["lm_eval"]
    tasks: tuple[str, ...] = Field(min_length=1, description="names of lm-eval tasks")
    path: Path | None = Field(default=None, description="a directory with tasks (YAML), relative to the suites file")
    metric: str = Field(min_length=1, description="the headline, `TASK/METRIC`, such as `gsm8k/exact_match`")
    direction: Direction = Direction.MAX
    num_fewshot: int | None = Field(default=None, ge=0, description="None: as the task says")
    limit: int | None = Field(default=None, ge=1, description="documents of each task; None: all of them")
    seed: Seed | tuple[Seed, Seed, Seed, Seed] | None = Field(
        default=None,
        description="of Python, numpy, torch and the few-shot examples; None: lm-eval's own, 0, 1234, 1234, 1234",
    )
    apply_chat_template: bool | str = Field(
        default=False,
        description="ask chat messages, by the snapshot's own template; a text: the name of one of several",
    )
    fewshot_as_multiturn: bool | None = Field(
        default=None, description="few-shot examples are turns of the chat; None: if there is a chat"
    )
    system_instruction: str | None = Field(default=None, description="before every prompt; the chat's system message")
    concurrency: int = Field(default=64, ge=1, le=1024, description="requests at once")
    code: bool = Field(default=False, description="the tasks' YAML may name Python of their own (`!function`)")

    @field_validator("tasks")
    @classmethod
    def _once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if twice := sorted({name for name in value if value.count(name) > 1}):
            raise ValueError(f"{twice[0]!r} is named twice")
        return value

    @field_validator("seed", mode="before")
    @classmethod
    def _one_or_four(cls, value: object) -> object:
        seeds = value if isinstance(value, list | tuple) and len(value) == 4 else (value,)
        if value is not None and not all(type(seed) is int and 0 <= seed < _SEED_END for seed in seeds):
            raise ValueError(f"{value!r} is no seed; write one from 0 to {_SEED_END - 1}, or four, as [0, 1, 2, 3]")
        return value

    @field_validator("apply_chat_template", mode="before")
    @classmethod
    def _on_off_or_named(cls, value: object) -> object:
        if not isinstance(value, bool) and not (isinstance(value, str) and value):
            raise ValueError(
                f"{value!r} is neither true, false nor a template's name; write true for the snapshot's own"
            )
        return value

    @model_validator(mode="after")
    def _turns_are_of_a_chat(self) -> Self:
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            raise ValueError("fewshot_as_multiturn: there is no chat to have turns; set apply_chat_template = true")
        return self

    @model_validator(mode="after")
    def _headline_names_a_task(self) -> Self:
        if "/" not in self.metric:
            raise ValueError(f"metric: {self.metric!r} names no task; write TASK/METRIC, such as {self.tasks[0]}/acc")
        return self

    def asked(self) -> dict[str, Any]:
        """What lm-eval is given, however it is written, by its own names."""
        seeds = (self.seed,) * 4 if isinstance(self.seed, int) else self.seed or _SEEDS
        turns, chat = self.fewshot_as_multiturn, self.apply_chat_template
        given = self.model_dump(include={"num_fewshot", "limit", "apply_chat_template", "system_instruction"})
        given["fewshot_as_multiturn"] = bool(chat) if turns is None else turns
        return {**given, **dict(zip(_SEEDED, seeds, strict=True))}


class FunctionConfig(Section):
    """`[suites.NAME]` with `kind = "function"`."""

    kind: Literal["function"]
    function: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="`module:Class`")
    metric: str = Field(min_length=1, description="the headline: one of the metrics that it reports")
    direction: Direction = Direction.MAX
    timeout_s: float = Field(default=3600.0, gt=0, description="for one checkpoint; then its process is ended")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the class")
    data: tuple[Path, ...] = Field(default=(), description="files that it reads: their bytes belong to what is asked")

    @field_validator("function")
    @classmethod
    def _trains_nothing(cls, value: str) -> str:
        if value.partition(":")[0].split(".")[0] in ("trainer", "megatron"):
            raise ValueError(f"{value!r} is what trains; name a class of your own that only evaluates")
        return value


@dataclass(frozen=True, slots=True)
class LmEvalSuite:
    """lm-eval tasks that can be run."""

    name: str
    digest: str
    config: LmEvalConfig
    path: Path | None

    size: ClassVar[int] = 1  # of a point, while its tasks were not read

    def digest_now(self) -> str:
        """Of its files as they are now: each evaluation reads them anew."""
        try:
            return _lm_eval_digest(self.config, self.path)
        except OSError:
            return self.digest  # it will fail by itself, if it needs them


@dataclass(frozen=True, slots=True)
class FunctionSuite:
    """A checkpoint eval function that can be imported; its module may lie beside the suites file."""

    name: str
    digest: str
    config: FunctionConfig
    base: Path
    source: str  # the digest of its module's text, where that doesn't lie beside the suites file

    size: ClassVar[int] = 1

    def digest_now(self) -> str:
        """Of its module and its data as they are now."""
        try:
            return _function_digest(self.config, self.base, self.source)
        except OSError:
            return self.digest


class LmEvalConfigs(Section):
    """Those of a suites file that are lm-eval's."""

    suites: dict[SuiteName, LmEvalConfig]


class FunctionConfigs(Section):
    """Those of a suites file that are functions."""

    suites: dict[SuiteName, FunctionConfig]


def load_lm_eval(name: str, config: LmEvalConfig, base: Path) -> LmEvalSuite:
    """Find the tasks.

    Raises:
        ConfigError: lm-eval is not installed, or has no such task; names the key.
    """
    key = f"suites.{name}"
    found = find_spec("lm_eval")
    if found is None or found.origin is None:
        hint = "pip install 'evalfleet[lm-eval]'"
        raise ConfigError("lm-eval is not installed", field=f"{key}.kind", hint=hint)
    path = (base / config.path).resolve() if config.path is not None else None
    if path is not None and not path.is_dir():
        raise ConfigError(f"there is no directory {path}", field=f"{key}.path")
    texts = dict(_yamls(path)) if path is not None else {}
    known = {task for text in texts.values() for task in _TASK.findall(text)}
    if any(task not in known for task in config.tasks):
        known |= {task for _, text in _yamls(Path(found.origin).parent / "tasks") for task in _TASK.findall(text)}
    for number, task in enumerate(config.tasks):
        if task not in known:
            hint = "name the directory of your own tasks with path; `lm-eval ls tasks` lists the others"
            raise ConfigError(f"there is no task {task!r}", field=f"{key}.tasks.{number}", hint=hint)
    if not config.code and (own := [file for file, text in texts.items() if "!function" in text]):
        hint = "set code = true, if you trust it: it runs in the tasks' process"
        raise ConfigError(f"{own[0]} names Python of its own", field=f"{key}.code", hint=hint)
    return LmEvalSuite(name, _lm_eval_digest(config, path), config, path)


def load_function(name: str, config: FunctionConfig, base: Path) -> FunctionSuite:
    """Import the class, in a process.

    Raises:
        ConfigError: it can't be imported, lacks what it needs, or trains.
    """
    command = [sys.executable, "-m", "eval_service.apart.function_worker", "--check", config.function, str(base)]
    field, environment = f"suites.{name}.function", without_secrets(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_IMPORT_S,
            start_new_session=True,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise ConfigError(f"{config.function} can't be imported within {_IMPORT_S:g} s", field=field) from exc
    if done.returncode:
        told = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        hint = "its module lies beside the suites file, or is installed; see docs/functions.md"
        raise ConfigError(f"{config.function}: {told[:300]}", field=field, hint=hint)
    for number, file in enumerate(config.data):
        if not (base / file).is_file():
            raise ConfigError(f"there is no file {base / file}", field=f"suites.{name}.data.{number}")
    source = done.stdout.strip()
    return FunctionSuite(name, _function_digest(config, base, source), config, base, source)


def _lm_eval_digest(config: LmEvalConfig, path: Path | None) -> str:
    asked = config.model_dump(mode="json", include={"kind", "tasks", "code"}) | config.asked()
    texts = sorted(text for _, text in _yamls(path)) if path is not None else []
    return _digest({**asked, "texts": texts, "data": list(_data(path)) if path is not None else []})


def _function_digest(config: FunctionConfig, base: Path, source: str) -> str:
    asked = config.model_dump(mode="json", exclude={"metric", "direction", "timeout_s", "data"})
    if (module := module_beside(config.function, base)) is not None:
        source = digest_of(module)
    if config.data:
        asked["data"] = [digest_of(base / file) for file in config.data]
    return _digest({**asked, "source": source})


def _yamls(directory: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted((*directory.rglob("*.yaml"), *directory.rglob("*.yml"))):
        yield path, path.read_text(encoding="utf-8", errors="replace")


def _data(directory: Path) -> Iterator[str]:
    """The other files of the directory, by content: rows that the tasks read, say, which are what is asked too. Hidden
    ones are an editor's, or a file system's."""
    for path in sorted(directory.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(directory).parts)
        if path.is_file() and not hidden and path.suffix not in (".yaml", ".yml", ".pyc"):
            yield f"{path.relative_to(directory)} {digest_of(path)}"


def _digest(asked: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(asked, sort_keys=True).encode())
