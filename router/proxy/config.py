"""`proxy.toml`: a proxy of its own, in front of servers that somebody else runs. Strict: unknown keys are errors."""

from __future__ import annotations

import hashlib
import ipaddress
import tomllib
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from router.limits import Limits
from router.proxy.limits import ProxyLimits
from router.proxy.table import Table, Target
from router.upstream import Upstream


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetConfig(_Section):
    """`[targets.NAME]`."""

    urls: tuple[str, ...] = Field(min_length=1)
    headers: dict[str, str] = Field(default_factory=dict, description="for every request upstream, such as a key")
    vocab_size: int | None = Field(default=None, ge=1, description="token ids are checked against it")


class ProxyConfig(_Section):
    """The whole file. `limits` and `clients` take the fields of `Limits` and `ProxyLimits`."""

    host: str = "127.0.0.1"
    port: int = Field(default=8710, ge=0, le=65535)
    api_key: str | None = Field(default=None, min_length=16, description="what clients must bring")
    allow_anonymous: bool = Field(default=False, description="listen beyond loopback though there is no key")
    probe_interval_s: float = Field(default=1.0, gt=0)
    probe_timeout_s: float = Field(default=5.0, gt=0)
    limits: dict[str, Any] = Field(default_factory=dict)
    clients: dict[str, Any] = Field(default_factory=dict)
    targets: dict[str, TargetConfig]

    @model_validator(mode="after")
    def _who_may_ask(self) -> Self:
        if self.api_key is None and not self.allow_anonymous and not _is_loopback(self.host):
            raise ValueError(
                f"api_key: {self.host} is reached from beyond this host; set a key, or listen on 127.0.0.1"
            )
        return self

    def keys(self) -> tuple[bytes, ...]:
        """The hashes of what clients may bring."""
        return () if self.api_key is None else (hashlib.sha256(self.api_key.encode()).digest(),)

    def router_limits(self) -> Limits:
        """What bounds requests upstream."""
        return Limits(**{"wait_timeout_s": 60.0, **self.limits})

    def client_limits(self) -> ProxyLimits:
        """What bounds clients."""
        return ProxyLimits(**self.clients)

    def table(self) -> Table:
        """The targets."""
        return Table(
            1,
            {
                name: Target(tuple(Upstream(url, url, target.headers) for url in target.urls), target.vocab_size)
                for name, target in self.targets.items()
            },
        )


def load_config(path: Path) -> ProxyConfig:
    """Read and check a file.

    Raises:
        ValueError: names the key and what is wrong with it.
    """
    try:
        config = ProxyConfig.model_validate(tomllib.loads(path.read_text()))
        config.router_limits(), config.client_limits(), config.table()
    except OSError as exc:
        raise ValueError(f"{path} can't be read: {exc}") from exc
    except tomllib.TOMLDecodeError as exc:
        raise ValueError(f"{path} is no TOML: {exc}") from exc
    except ValidationError as exc:
        fault = exc.errors()[0]
        where = "".join(f"{part}: " for part in (path.name, ".".join(map(str, fault["loc"]))) if part)
        raise ValueError(f"{where}{fault['msg'].removeprefix('Value error, ')}") from exc
    except TypeError as exc:
        raise ValueError(f"{path.name}: unknown key in limits or clients: {exc}") from exc
    return config


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
