"""`[trackers.NAME]`, `[webhooks.NAME]` and `[traces]` of `fleet.toml`. Secrets are named by variable only."""

from __future__ import annotations

from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eval_service.access.hosts import as_address, never_called

TRACES = "traces"  # the name that traces are delivered under


class WebhookEvent(StrEnum):
    """What a webhook may be told of."""

    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"
    BEST = "best"  # a point is better than all before it
    ALARM = "alarm"  # something may be wrong with the run
    DRAINED = "drained"  # a drain has ended; its data says how


class Target(BaseModel):
    """What all of them have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    runs: tuple[str, ...] = Field(default=("*",), description="patterns of runs that it is told of")
    timeout_s: float = Field(default=60.0, gt=0, le=600, description="for one delivery; then its process is ended")

    def takes(self, run: str | None) -> bool:
        """Whether it is told of a run."""
        return run is not None and any(fnmatchcase(run, pattern) for pattern in self.runs)


class TrackerConfig(Target):
    """`[trackers.NAME]`."""

    kind: Literal["jsonl", "tensorboard", "mlflow", "wandb"]
    path: Path | None = Field(default=None, description="tensorboard: the directory; None: beside the run")
    url: str | None = Field(default=None, description="mlflow: its tracking URI; wandb: another server")
    project: str = Field(default="evalfleet", description="wandb: the project; mlflow: the experiment")
    entity: str | None = Field(default=None, description="wandb: whose project it is; None: the key's owner")
    api_key_env: str | None = Field(default=None, description="environment variable with the wandb key or mlflow token")
    offline: bool = Field(default=False, description="wandb: write files in state_dir, for `wandb sync`")

    @model_validator(mode="after")
    def _only_what_it_reads(self) -> Self:
        read = {
            "jsonl": set(),
            "tensorboard": {"path"},
            "mlflow": {"url", "project", "api_key_env"},
            "wandb": {"url", "project", "entity", "api_key_env", "offline"},
        }[self.kind]
        for name in sorted(self.model_fields_set - read - {"kind", "runs", "timeout_s"}):
            raise ValueError(f"{name}: a {self.kind} tracker does not read it; remove it")
        if self.kind == "mlflow" and self.url is None:
            raise ValueError("url: name the tracking server, such as 'http://mlflow:5000'")
        if self.kind == "wandb" and not self.offline and self.api_key_env is None:
            raise ValueError("api_key_env: name the variable with the key; or set offline = true")
        if self.url is not None:
            _check_url("url", self.url, {"http", "https", "file", "sqlite"} if self.kind == "mlflow" else None)
        return self


class WebhookConfig(Target):
    """`[webhooks.NAME]`."""

    url: str
    secret_env: str = Field(description="environment variable with the secret that deliveries are signed with")
    on: tuple[WebhookEvent, ...] = Field(default=tuple(WebhookEvent), min_length=1)
    timeout_s: float = Field(default=10.0, gt=0, le=600, description="for one delivery; then its process is ended")

    @model_validator(mode="after")
    def _a_url(self) -> Self:
        _check_url("url", self.url)
        address = as_address(urlsplit(self.url).hostname or "")
        if address is not None and never_called(address):
            raise ValueError(f"url: {address} is link-local or a metadata address; name the hook's own")
        return self

    @property
    def host(self) -> str:
        """Host, with the port where one is named."""
        return urlsplit(self.url).netloc.lower()


class TracesConfig(Target):
    """`[traces]`."""

    endpoint: str = Field(description="OTLP over HTTP, such as http://collector:4318/v1/traces")
    token_env: str | None = Field(default=None, description="environment variable with a bearer token")

    @model_validator(mode="after")
    def _a_url(self) -> Self:
        _check_url("endpoint", self.endpoint)
        return self


def secret_names(target: Target) -> tuple[str, ...]:
    """The environment variables that its process is given."""
    names = {getattr(target, name, None) for name in ("api_key_env", "secret_env", "token_env")}
    return tuple(sorted(name for name in names if name))


def _check_url(key: str, url: str, schemes: set[str] | None = None) -> None:
    parts = urlsplit(url)
    if parts.scheme not in (schemes or {"http", "https"}):
        raise ValueError(f"{key}: {url!r} is no http(s)://host; name the whole address")
    if parts.scheme in ("http", "https") and not parts.hostname:
        raise ValueError(f"{key}: {url!r} names no host; name the whole address")
    if parts.username or parts.password:
        raise ValueError(f"{key}: it holds credentials; name the variable that holds them instead")
