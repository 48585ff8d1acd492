"""What the eval hook asks of the model: to copy its weights of now, to vouch for them, and to write them out later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import metadata
from typing import Protocol

from eval_service.contract.manifest import Canary
from eval_service.contract.snapshot import SnapshotWriter


class ExportFailed(Exception):
    """The snapshot could not be written, on this rank or another."""


class Weights(Protocol):
    """The weights of a model. On several ranks each method is called by all of them."""

    def here(self) -> AbstractContextManager[None]:
        """The weights are where `stage` and `canary` need them meanwhile; by itself on each rank."""

    def stage(self) -> None:
        """Copy the weights of now into the buffer: all that a training step waits for."""

    def canary(self) -> Canary | None:
        """Log-probs of the fixed sequences from the trainer's own forward pass; None where they are turned off."""

    def fill(self, writer: SnapshotWriter) -> None:
        """Write what was staged, with config and tokenizer; runs in the background.

        Raises:
            ExportFailed: some rank could not write its part (disk full, say), or a tensor is not finite.
        """


def canary_of(dtype: str, token_ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> Canary | None:
    """A canary; None where a log-prob is not finite: such a model can't be vouched for, and its export is checked."""
    rows = tuple(tuple(float(value) for value in row) for row in logprobs)
    if not all(math.isfinite(value) for row in rows for value in row):
        return None
    return Canary(dtype=dtype, token_ids=tuple(tuple(row) for row in token_ids), logprobs=rows)


def exporter_name() -> str:
    """Who writes snapshots, for their manifests."""
    try:
        return f"evalfleet-trainer {metadata.version('evalfleet')}"
    except metadata.PackageNotFoundError:  # run from a source tree
        return "evalfleet-trainer"
