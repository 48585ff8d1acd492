"""The grades of engine, and how a server of each is started.

Arguments are laid over each other: SGLang's defaults, the grade's, the fleet's overrides, the group's; what the service
itself must know (model, address, keys) can't be overridden. The keys never enter a command line: they reach the server
with the rest of its boot over a pipe.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from eval_service.contract.errors import ConfigError
from eval_service.fleet_config import GroupConfig

STANDINS = Path(__file__).parent / "standins"
_ROOT = Path(__file__).parents[2]

# When a part of it dies SGLang spends 65 s on dumps of it before it ends; until then it looks alive. Ops may set these.
_NO_DUMPS = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}

# The service answers for these; an override would break what it tells the controller.
RESERVED = frozenset(
    {"model_path", "host", "port", "api_key", "admin_api_key", "device", "dtype", "nccl_port", "tp_size", "config"}
)
# No warm-up request: the replica's first canary is one. Metrics: the dashboards read them.
_SGLANG: dict[str, Any] = {"skip_server_warmup": True, "enable_metrics": True}
# The torch-native path; a pool of 20,000 tokens; no busy loop on machines that train beside it. SGLang takes whatever
# memory goes on the host while it loads for that of its weights, and doesn't start where it is more than the fraction:
# a large one, so that a neighbour's start is not in its way. The pool is no larger for it.
_SGLANG_CPU: dict[str, Any] = {
    **_SGLANG,
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.9,
    "max_total_tokens": 20000,
    "sleep_on_idle": True,
}


class Grade(StrEnum):
    """What kind of server a group runs."""

    SGLANG = "sglang"
    SGLANG_CPU = "sglang-cpu"
    FAKE = "fake"


@dataclass(frozen=True, slots=True)
class Keys:
    """Of one boot: `api` may generate, `admin` may also change weights."""

    api: str = field(repr=False)
    admin: str = field(repr=False)

    @classmethod
    def fresh(cls) -> Keys:
        """New random keys."""
        return cls(secrets.token_urlsafe(24), secrets.token_urlsafe(24))


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the replica must know of the boot model's config.json; lengths in tokens."""

    vocab_size: int
    context_length: int
    dtype: str


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """How to start one server: `boot` is JSON for its standard input and holds the keys."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    boot: str = field(repr=False)


def cuda_available() -> bool:
    """Whether torch can use CUDA here; torch is asked (and imported) only where there is a driver with a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return False
    import torch

    return torch.cuda.is_available()


def resolve_grade(wanted: str, *, cuda: bool) -> Grade:
    """Turn `auto` into a grade, and refuse one that can't be.

    Raises:
        ConfigError: the CPU engine where CUDA is there, or the GPU engine where it is not.
    """
    if wanted == "auto":
        return Grade.SGLANG if cuda else Grade.SGLANG_CPU
    grade = Grade(wanted)
    if grade is Grade.SGLANG_CPU and cuda:
        raise ConfigError(
            "the CPU engine runs SGLang with stand-ins for its CUDA modules and is refused where CUDA is there",
            field="grade",
            hint="use grade = 'sglang' (or 'auto'), or hide the GPUs with CUDA_VISIBLE_DEVICES=''",
        )
    if grade is Grade.SGLANG and not cuda:
        raise ConfigError(
            "torch finds no CUDA device on this machine", field="grade", hint="use grade = 'auto' or 'sglang-cpu'"
        )
    return grade


def merged_overrides(fleet: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Lay the group's overrides over the fleet's.

    Raises:
        ConfigError: one names what the service sets itself.
    """
    merged = {key.replace("-", "_"): value for table in (fleet, group) for key, value in table.items()}
    for key in sorted(RESERVED & merged.keys()):
        raise ConfigError("the service sets this itself", field=f"overrides.{key}", hint="remove it")
    return merged


def read_model_facts(model: Path, group: GroupConfig, overrides: Mapping[str, Any]) -> ModelFacts:
    """Read config.json of the boot model.

    Raises:
        ConfigError: it is not there or lacks what is needed.
    """
    try:
        config = json.loads((model / "config.json").read_text())
        vocab_size = int(config["vocab_size"])
        longest = int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(
            f"{model}/config.json can't be used: {exc!r}", field="model", hint="name an HF model directory"
        ) from exc
    dtype = group.dtype or config.get("dtype") or config.get("torch_dtype") or "auto"
    return ModelFacts(vocab_size, int(overrides.get("context_length") or longest), str(dtype))


def plan_server(
    grade: Grade,
    group: GroupConfig,
    *,
    fleet_overrides: Mapping[str, Any],
    host: str,
    port: int,
    nccl_port: int,
    keys: Keys,
) -> ServerPlan:
    """Build the command line, environment and boot of one server.

    Args:
        host: the address that it binds.
        port: of its HTTP API; `nccl_port` is the internal one. Both must be free.

    Raises:
        ConfigError: an override that can't be, or a model that can't be read.
    """
    if group.model is None:
        raise ConfigError("engines need a model to boot with", field="model", hint="name an HF directory")
    overrides = merged_overrides(fleet_overrides, group.overrides)
    model = group.model.resolve()
    facts = read_model_facts(model, group, overrides)
    if grade is Grade.FAKE:
        boot = {"model": str(model), "host": host, "port": port, "knobs": overrides}
        return _plan("eval_service.engine.fake", boot, keys, {})
    arguments = {
        "model_path": str(model),
        "host": host,
        "port": port,
        "nccl_port": nccl_port,
        "dtype": facts.dtype,
        **(_SGLANG_CPU if grade is Grade.SGLANG_CPU else _SGLANG),
        **overrides,
    }
    if grade is Grade.SGLANG_CPU:
        arguments["device"] = "cpu"
    elif group.num_gpus_per_engine > 1:
        arguments["tp_size"] = group.num_gpus_per_engine
    boot = {"argv": to_argv(arguments), "cpu": grade is Grade.SGLANG_CPU}
    return _plan("eval_service.engine.launch", boot, keys, _sglang_env(grade))


def to_argv(arguments: Mapping[str, Any]) -> list[str]:
    """Spell arguments as SGLang's own parser reads them: True is a bare flag; False and None leave it out."""
    argv: list[str] = []
    for key, value in arguments.items():
        if value is None or value is False:
            continue
        argv.append(f"--{key.replace('_', '-')}")
        if isinstance(value, list | tuple):
            argv.extend(str(item) for item in value)
        elif isinstance(value, dict):
            argv.append(json.dumps(value))
        elif value is not True:
            argv.append(str(value))
    return argv


def _plan(module: str, boot: dict[str, Any], keys: Keys, env: dict[str, str]) -> ServerPlan:
    paths = [path for path in (env.get("PYTHONPATH"), _checkout(), os.environ.get("PYTHONPATH")) if path]
    return ServerPlan(
        command=(sys.executable, "-m", module),
        env={**env, "PYTHONPATH": os.pathsep.join(paths)},
        boot=json.dumps({**boot, "api_key": keys.api, "admin_api_key": keys.admin}),
    )


def _sglang_env(grade: Grade) -> dict[str, str]:
    quiet = {name: os.environ.get(name, value) for name, value in _NO_DUMPS.items()}
    if grade is Grade.SGLANG:
        return quiet
    return {
        **quiet,
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": str(STANDINS),
    }


def _checkout() -> str | None:
    """Where this package lies if it is not installed: a child process has to be told."""
    return None if _ROOT.name in ("site-packages", "dist-packages") else str(_ROOT)
