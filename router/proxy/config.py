"""`proxy.toml`: a proxy of its own, in front of servers that somebody else runs. Strict: unknown keys are errors."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

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
    probe_interval_s: float = Field(default=1.0, gt=0)
    probe_timeout_s: float = Field(default=5.0, gt=0)
    limits: dict[str, Any] = Field(default_factory=dict)
    clients: dict[str, Any] = Field(default_factory=dict)
    targets: dict[str, TargetConfig]

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
        raise ValueError(f"{path.name}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from exc
    except TypeError as exc:
        raise ValueError(f"{path.name}: unknown key in limits or clients: {exc}") from exc
    return config
