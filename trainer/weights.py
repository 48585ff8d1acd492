"""What the eval hook asks of the model: to write its weights of now, and to vouch for them. Needs no torch."""

from __future__ import annotations

from importlib import metadata
from typing import Protocol

from eval_service.contract.manifest import Canary
from eval_service.contract.snapshot import SnapshotWriter


class Weights(Protocol):
    """What can write the weights of now into a snapshot."""

    def fill(self, writer: SnapshotWriter) -> None:
        """Write weights, config and tokenizer.

        Raises:
            OSError: as the file system has it (disk full, say).
        """

    def canary(self) -> Canary | None:
        """Log-probs of the fixed sequences from the trainer's own forward pass; None where they are turned off."""


def exporter_name() -> str:
    """Who writes snapshots, for their manifests."""
    try:
        return f"evalfleet-trainer {metadata.version('evalfleet')}"
    except metadata.PackageNotFoundError:  # run from a source tree
        return "evalfleet-trainer"
