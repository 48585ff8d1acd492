"""What a launch asks of the fleet, frozen.

Invariant: whether engines start at all is `starts_inference_engines` and nothing else; no other module reads
`num_eval_engines`.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=0)]


class LaunchConfig(BaseModel):
    """`[fleet]` of `run.toml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_eval_engines: Count | tuple[Count, Count] = Field(
        default=1, description="engines of the eval group: a count, or least and most"
    )

    @property
    def starts_inference_engines(self) -> bool:
        """The eval group may have engines."""
        counts = self.num_eval_engines
        return (max(counts) if isinstance(counts, tuple) else counts) > 0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if isinstance(self.num_eval_engines, tuple) and self.num_eval_engines[0] > self.num_eval_engines[1]:
            raise ValueError("num_eval_engines: the least must not be above the most")
        return self
