"""`fleet.toml`: the service's own settings, and the groups of engines. Strict: unknown keys are errors.

Relative paths are resolved against the file's directory.
"""

from __future__ import annotations

import re
import tomllib
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eval_service.access.config import TokenConfig
from eval_service.access.hosts import as_address, never_called
from eval_service.contract.errors import ConfigError
from eval_service.objects.config import ObjectsConfig
from eval_service.trackers.config import TracesConfig, TrackerConfig, WebhookConfig

EVAL_GROUP = "eval"
_Config = TypeVar("_Config", bound=BaseModel)


class Section(BaseModel):
    """The base of a config section."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ServiceConfig(Section):
    """`[service]`."""

    host: str = "127.0.0.1"
    port: int = Field(default=8700, ge=0, le=65535)
    proxy_port: int | None = Field(default=None, ge=0, le=65535, description="of `/lanes/{point}/...`; None: no proxy")
    proxy_host: str | None = Field(default=None, description="the address that it listens on; None: `host`")
    proxy_api_key_env: str | None = Field(default=None, description="environment variable with its clients' key")
    engine_host: str | None = Field(
        default=None, description="interface, network or address that engines listen on; None: see docs/deploy.md"
    )
    state_dir: Path = Field(default=Path("evalfleet-state"), description="the ledger and logs; local disk")
    ledger: str | None = Field(default=None, repr=False, description="its URL; None: SQLite in state_dir")
    roots: tuple[Path, ...] = Field(min_length=1, description="snapshots and base models must lie in one of these")
    scan_interval_s: float = Field(default=30.0, gt=0, description="of the runs' roots, for what nobody POSTed")
    visibility_timeout_s: float = Field(default=60.0, ge=0, description="how long a shared file system may hide files")
    reservation_timeout_s: float = Field(default=1800.0, gt=0)
    controller_grace_s: float = Field(default=1.5, gt=0, description="between giving a controller up and killing it")
    leftover_idle_s: float = Field(default=3600.0, gt=0, description="what is half written and that old is dead")
    point_timeout_s: float = Field(default=3600.0, gt=0, description="from queued to its end; then `failed: deadline`")
    pin_timeout_s: float = Field(default=300.0, gt=0)
    sample_timeout_s: float = Field(default=300.0, gt=0)
    max_attempts: int = Field(default=3, ge=1)
    engine_lost_s: float = Field(default=5.0, gt=0, description="without a poll that was due; then the engine is lost")
    handover_s: float = Field(
        default=10.0, ge=0, description="what a leaving engine has not done by then runs elsewhere"
    )
    scorer_processes: int = Field(default=1, ge=1)
    allow_code: bool = Field(default=False, description="let suites run what a model wrote; see docs/suites.md")
    allow_auto_map: bool = Field(default=False, description="let a snapshot's config name code of its own")
    webhook_hosts: tuple[str, ...] = Field(default=(), description="host[:port] that webhooks may be sent to")
    webhook_networks: tuple[str, ...] = Field(default=(), description="private networks that their names may lead to")
    public_read: bool = Field(default=False, description="let anybody read without a token")
    allow_anonymous: bool = Field(default=False, description="listen beyond loopback though there is no token")
    requests_per_s: float = Field(default=1000.0, ge=0, description="of one token, or one address; 0: no bound")

    @property
    def stop_s(self) -> float:
        """What an orderly stop may take: the engines' handover, and what Serve needs to end them beside it."""
        return max(35.0, self.handover_s + 25.0)


class GroupConfig(Section):
    """`[groups.NAME]`."""

    kind: Literal["pinned", "frozen", "attached", "placeholder", "prefill", "decode"] = "pinned"
    model: Path | None = Field(default=None, description="HF directory that the engines boot with")
    grade: Literal["auto", "sglang", "sglang-cpu", "fake"] = "auto"
    num_engines: int | tuple[int, int] = Field(default=1, description="a count, or least and most")
    autoscale: bool = Field(default=False, description="as many within num_engines as queued work is worth")
    idle_timeout_s: float = Field(default=300.0, ge=0, description="autoscale: with less work for so long, fewer")
    num_gpus_per_engine: int = Field(default=1, ge=0, description="0 on the CPU engine")
    node_resources: dict[str, float] = Field(
        default_factory=dict, description="Ray's custom resources that each engine takes: only nodes with them get any"
    )
    server_concurrency: int = Field(default=32, ge=1, description="requests in flight per engine")
    start_timeout_s: float = Field(default=300.0, gt=0)
    dtype: str | None = None
    overrides: dict[str, Any] = Field(default_factory=dict, description="SGLang server arguments, group over fleet")
    urls: tuple[str, ...] = Field(default=(), description="attached engines")
    api_key_env: str | None = Field(default=None, description="environment variable with the attached engines' key")
    admin_api_key_env: str | None = Field(default=None, description="the same of their admin key, if it is another")

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and most engines."""
        return self.num_engines if isinstance(self.num_engines, tuple) else (self.num_engines, self.num_engines)

    @property
    def desired(self) -> int:
        """How many engines there should be where nobody has asked for another number."""
        if self.kind == "attached":
            return len(self.urls)
        return 0 if self.kind == "placeholder" else self.bounds[0]

    @model_validator(mode="after")
    def _refusals(self) -> Self:
        if self.kind in ("prefill", "decode"):
            raise ValueError(f"kind: {self.kind} groups are not served; use one pinned group")
        least, most = self.bounds
        if not 0 <= least <= most:
            raise ValueError("num_engines: the least must be in 0..most")
        if self.kind != "placeholder" and self.model is None:
            raise ValueError("model: name the HF directory that the engines boot with")
        if most == 0 and self.overrides and self.kind != "attached":
            raise ValueError("overrides: the group has no engines; allow some with num_engines, or remove them")
        if self.autoscale and self.kind != "pinned":
            raise ValueError(f"autoscale: points queue for the pinned group, and this one is {self.kind}")
        self._check_attached()
        return self

    def _check_attached(self) -> None:
        if self.kind != "attached":
            if self.urls or self.api_key_env or self.admin_api_key_env:
                raise ValueError(f"urls: {self.kind} engines have none; use kind = 'attached' for engines by URL")
            return
        if not self.urls:
            raise ValueError("urls: name the engines, such as ['http://gpu-7:30000']")
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"urls: {url!r} is no http(s)://host:port")
            address = as_address(parts.hostname)
            if address is not None and never_called(address):
                raise ValueError(f"urls: {parts.hostname} is link-local or a metadata address; name the engine's own")
            if parts.username or parts.password:  # it would be shown by /fleet
                raise ValueError("urls: one holds credentials; name the variable that holds the key with api_key_env")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls: one is named twice")

    @property
    def gpus(self) -> int:
        """GPUs that it may come to use; attached engines use somebody else's."""
        return 0 if self.kind == "attached" else self.bounds[1] * self.num_gpus_per_engine


class FleetConfig(Section):
    """The whole of `fleet.toml`."""

    service: ServiceConfig
    num_gpus: int = Field(default=0, ge=0, description="GPUs of all groups together")
    overrides: dict[str, Any] = Field(default_factory=dict, description="SGLang server arguments of every group")
    groups: dict[str, GroupConfig]
    trackers: dict[str, TrackerConfig] = Field(default_factory=dict, description="who is told of every point")
    webhooks: dict[str, WebhookConfig] = Field(default_factory=dict, description="who is told of news")
    tokens: dict[str, TokenConfig] = Field(default_factory=dict, description="who may do what")
    traces: TracesConfig | None = Field(default=None, description="OpenTelemetry traces of points; None: none")
    objects: ObjectsConfig | None = Field(default=None, description="object stores of snapshots; None: none")

    @model_validator(mode="after")
    def _webhooks_are_allowed(self) -> Self:
        allowed = {host.lower() for host in self.service.webhook_hosts}
        for name, hook in self.webhooks.items():
            if hook.host not in allowed:
                raise ValueError(f"webhooks.{name}.url: {hook.host} is not allowed; name it in service.webhook_hosts")
        return self

    @model_validator(mode="after")
    def _webhook_networks_are_some(self) -> Self:
        for text in self.service.webhook_networks:
            try:
                ip_network(text)
            except ValueError as exc:
                raise ValueError(f"service.webhook_networks: {text!r} is no network; write 10.1.0.0/16") from exc
        return self

    @model_validator(mode="after")
    def _one_eval_group(self) -> Self:
        pinned = [name for name, group in self.groups.items() if group.kind == "pinned"]
        if pinned != [EVAL_GROUP]:
            raise ValueError(f"groups: exactly one pinned group, named {EVAL_GROUP!r}; found {pinned}")
        return self

    @model_validator(mode="after")
    def _gpus_add_up(self) -> Self:
        asked = {name: group.gpus for name, group in self.groups.items() if group.gpus}
        if len(asked) == 1 and self.num_gpus % (each := self.groups[next(iter(asked))].num_gpus_per_engine):
            raise ValueError(
                f"num_gpus: {self.num_gpus} don't divide by groups.{next(iter(asked))}.num_gpus_per_engine = {each}; "
                "take a multiple"
            )
        if self.num_gpus and sum(asked.values()) != self.num_gpus:
            told = " + ".join(f"{count} ({name})" for name, count in asked.items()) or "none"
            raise ValueError(
                f"num_gpus: the groups' GPUs are {told}, and num_gpus is {self.num_gpus}; they must add up"
            )
        return self

    @model_validator(mode="after")
    def _attached_engines_are_sized_like_ours(self) -> Self:
        ours = self.groups[EVAL_GROUP].server_concurrency
        for name, group in self.groups.items():
            if group.kind == "attached" and group.server_concurrency != ours:
                raise ValueError(
                    f"groups.{name}.server_concurrency: attached engines take what the eval group's take, {ours}"
                )
        return self


def load_fleet(path: Path) -> FleetConfig:
    """Read and check a fleet file; relative paths become absolute.

    Raises:
        ConfigError: names the key and what is wrong with it.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"{path} can't be read: {exc}", hint="see docs/configuration.md") from exc
    config = validated(FleetConfig, table, path)
    base = path.resolve().parent
    service = config.service.model_copy(
        update={
            "state_dir": base / config.service.state_dir,
            "roots": tuple((base / root).resolve() for root in config.service.roots),
        }
    )
    groups = {
        name: group.model_copy(update={"model": base / group.model if group.model else None})
        for name, group in config.groups.items()
    }
    trackers = {
        name: tracker.model_copy(update={"path": base / tracker.path if tracker.path else None})
        for name, tracker in config.trackers.items()
    }
    objects = config.objects
    if objects is not None and objects.cache_dir is not None:
        objects = objects.model_copy(update={"cache_dir": base / objects.cache_dir})
    tokens = {
        name: token.model_copy(update={"token_file": base / token.token_file if token.token_file else None})
        for name, token in config.tokens.items()
    }
    parts = {"service": service, "groups": groups, "trackers": trackers, "tokens": tokens, "objects": objects}
    return config.model_copy(update=parts)


def validated(model: type[_Config], table: dict[str, Any], path: Path) -> _Config:
    """Validate a config table; the first fault becomes a ConfigError that names its key.

    Raises:
        ConfigError: with the dotted key and, for an unknown one, the hint that says so.
    """
    try:
        return model.model_validate(table)
    except ValidationError as exc:
        fault = exc.errors()[0]
        key, message = ".".join(str(part) for part in fault["loc"]), fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            hint = "remove it, or see docs/configuration.md for the keys"
            raise ConfigError(f"{path.name}: unknown key", field=key or None, hint=hint) from exc
        if fault["type"] == "value_error" and (own := re.match(r"([a-z_.0-9]+): ", message)):
            key, message = ".".join(filter(None, (key, own[1]))), message[own.end() :]
        message, _, fix = message.partition("; ")
        raise ConfigError(
            f"{path.name}: {message}", field=key or None, hint=fix or "see docs/configuration.md"
        ) from exc
