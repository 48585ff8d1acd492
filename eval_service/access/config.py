"""`[tokens.NAME]` of `fleet.toml`: who may do what. The file names where a token is, and never holds one."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Scope(StrEnum):
    """What a token may do; each may also do what the ones before it may."""

    READ = "read"
    DISPATCH = "dispatch"
    ADMIN = "admin"

    def reaches(self, needed: Scope) -> bool:
        """Whether it is enough."""
        order = tuple(Scope)
        return order.index(self) >= order.index(needed)


class TokenConfig(BaseModel):
    """`[tokens.NAME]`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    scope: Scope
    token_env: str | None = Field(default=None, description="environment variable with the token")
    token_file: Path | None = Field(default=None, description="file with a token a line")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.token_env is None) == (self.token_file is None):
            raise ValueError("token_env: name a variable, or a file with token_file; one of the two")
        return self
