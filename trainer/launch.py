"""What a launch asks of the fleet, frozen.

Invariant: whether engines start at all is `starts_inference_engines` and nothing else; no other module reads
`num_eval_engines`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eval_service.contract.errors import ConfigError

Count = Annotated[int, Field(ge=0)]


class LaunchConfig(BaseModel):
    """`[fleet]` of `run.toml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_eval_engines: Count | tuple[Count, Count] | None = Field(
        default=None, description="engines of the eval group: a count, or least and most; None: as the fleet has it"
    )
    num_attached_engines: Count = Field(default=0, description="engines of attached groups, which are never started")
    allow_shared_gpu: bool = Field(default=False, description="trainer and engines may have a GPU in common")

    @property
    def starts_inference_engines(self) -> bool:
        """The eval group may have engines."""
        counts = self.num_eval_engines
        if counts is None:  # a service of somebody else's, which has its own fleet
            return True
        return (max(counts) if isinstance(counts, tuple) else counts) > 0

    @property
    def has_engines(self) -> bool:
        """Something may evaluate, whoever started it."""
        return self.starts_inference_engines or self.num_attached_engines > 0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if isinstance(self.num_eval_engines, tuple) and self.num_eval_engines[0] > self.num_eval_engines[1]:
            raise ValueError("num_eval_engines: the least must not be above the most")
        return self


def as_the_fleet_says(stated: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """The `[fleet]` table with what fleet.toml says of it, `num_eval_engines` as [least, most].

    Raises:
        ConfigError: the run file states another number.
    """
    for key, value in told.items():
        if key in stated and _range(stated[key]) != _range(value):
            raise ConfigError(
                f"run.toml says {stated[key]}, and fleet.toml {value}",
                field=f"fleet.{key}",
                hint="remove it from run.toml, or change the groups of fleet.toml",
            )
    return {**stated, **told}


def _range(count: Any) -> list[Any]:
    return list(count) if isinstance(count, list | tuple) else [count, count]
