"""`[objects]` of `fleet.toml`: which object stores snapshots may come from. Secrets are named by variable only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eval_service.contract.errors import ConfigError, InvalidRequest
from eval_service.objects.urls import check_url, protocol_of

_SECRET = re.compile(r"(?i)key|secret|token|passw|credential|^sas|connection_?str")


class ObjectsConfig(BaseModel):
    """What may be fetched from where, and how much of it a node keeps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefixes: tuple[str, ...] = Field(min_length=1, description="snapshots named by URL must lie under one of these")
    cache_dir: Path | None = Field(default=None, description="on each node's local disk; None: in state_dir")
    cache_bytes: int = Field(default=200_000_000_000, gt=0, description="bound of the cache on each node")
    fetch_timeout_s: float = Field(default=600.0, gt=0, description="for one snapshot to be on a node")
    attempts: int = Field(default=3, ge=1, description="of each request to a store")
    parallel: int = Field(default=4, ge=1, le=64, description="files of one snapshot that are fetched at once")
    options: dict[str, dict[str, Any]] = Field(default_factory=dict, description="fsspec options, by protocol")
    options_env: dict[str, dict[str, str]] = Field(
        default_factory=dict, description="by protocol, options whose values are in environment variables"
    )

    @model_validator(mode="after")
    def _prefixes_are_plain(self) -> Self:
        for prefix in self.prefixes:
            try:
                check_url(prefix, "prefixes")
            except InvalidRequest as exc:
                raise ValueError(f"prefixes: {exc.message}; {exc.hint}") from exc
        return self

    @model_validator(mode="after")
    def _no_secrets(self) -> Self:
        for protocol, options in self.options.items():
            for name in _leaves(options):
                if _SECRET.search(name):
                    raise ValueError(
                        f"options.{protocol}.{name}: a secret must not be in the file; name the environment variable "
                        f"that holds it with options_env.{protocol}.{name}"
                    )
        return self

    @property
    def protocols(self) -> tuple[str, ...]:
        """Of the prefixes."""
        return tuple(dict.fromkeys(protocol_of(prefix) for prefix in self.prefixes))

    def secrets(self, protocol: str, environ: Mapping[str, str]) -> dict[str, str]:
        """A protocol's options from the environment.

        Raises:
            ConfigError: a variable is not set.
        """
        named = self.options_env.get(protocol, {})
        for option, variable in named.items():
            if not environ.get(variable):
                raise ConfigError(
                    f"the environment variable {variable} is not set", field=f"objects.options_env.{protocol}.{option}"
                )
        return {option: environ[variable] for option, variable in named.items()}


def _leaves(options: Mapping[str, Any]) -> list[str]:
    """The names of options, those within tables included."""
    found: list[str] = []
    for name, value in options.items():
        found += _leaves(value) if isinstance(value, Mapping) else [name]
    return found
