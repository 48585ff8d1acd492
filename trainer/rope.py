"""Rotary positions: inverse frequencies, each variant as transformers has it, and positions that begin anew."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainer.architecture import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """float32, [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    return plain


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Long waves are stretched by `factor`, short ones left, and what lies between is blended."""
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    share = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - share) * plain / rope.factor + share * plain
    stretched = torch.where(wavelength > longest, plain / rope.factor, plain)
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, blended, stretched)


class Positions:
    """A hook on megatron's rotary embedding, whose angles are those of 0, 1, ... in every row; with `at`, of others."""

    def __init__(self) -> None:
        self._now: Tensor | None = None

    @contextmanager
    def at(self, positions: Tensor | None) -> Iterator[None]:
        """Of these, [b, s], meanwhile; None: 0, 1, ..."""
        self._now = positions
        try:
            yield
        finally:
            self._now = None

    def __call__(self, _: Any, __: Any, angles: Tensor) -> Tensor:
        """[s, 1, 1, d] -> the same, or [s, b, 1, d]."""
        return angles if self._now is None else angles[self._now.t()].squeeze(2)
