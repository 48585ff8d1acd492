"""The trainer's own checkpoints: `<save_dir>/step_<step>/` with one file a rank, and `save_hf` directories beside.

Invariants: a directory under its final name is whole (written beside, synced, renamed); files hold tensors and plain
values only and are read as such. A `save_hf` directory lies at `<save_dir>/hf/<run>/step_<step>-<digest8>/`, with the
manifest and marker of a snapshot; nothing here ever deletes one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eval_service.contract.errors import ConfigError
from trainer.parallel import Channel

FIELD = "train.save_dir"
_META = "meta.json"
_NAME = re.compile(r"step_(\d{1,12})")


@dataclass(frozen=True, slots=True)
class CheckpointStore:
    """The checkpoints of one run."""

    directory: Path
    run: str

    @property
    def hf_root(self) -> Path:
        """The root of the `save_hf` directories."""
        return self.directory / "hf"

    def latest(self) -> int | None:
        """The step of the newest checkpoint; None: there is none."""
        if not self.directory.is_dir():
            return None
        found = (_NAME.fullmatch(path.name) for path in self.directory.iterdir() if (path / _META).is_file())
        return max((int(match[1]) for match in found if match), default=None)

    def save(self, step: int, label: str | None, state: dict[str, Any], channel: Channel) -> Path:
        """Publish a checkpoint; every rank calls this.

        Args:
            label: names this rank's part of the model; None: another rank saves the same.
            state: tensors and plain values.
        """
        target = self.directory / f"step_{step}"
        partial = self.directory / channel.broadcast(f".partial-{uuid.uuid4().hex}")
        partial.mkdir(parents=True, exist_ok=True)
        try:
            if label is not None:
                torch.save(state, partial / f"{label}.pt")
                _sync(partial / f"{label}.pt")
            channel.gather(None)  # every part is there
            if channel.rank == 0:
                (partial / _META).write_text(json.dumps({"run": self.run, "step": step, "format_version": 1}))
                _sync(partial / _META)
                partial.rename(target)
                _sync(self.directory)
            channel.gather(None)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return target

    def load(self, step: int, rank: str) -> dict[str, Any]:
        """Read what `save` was given.

        Raises:
            ConfigError: it can't be read, or is of another layout of ranks.
        """
        path = self.directory / f"step_{step}" / f"{rank}.pt"
        try:
            return dict(torch.load(path, map_location="cpu", weights_only=True))
        except (OSError, RuntimeError, ValueError) as exc:
            raise ConfigError(
                f"{path} can't be read: {exc}", field=FIELD, hint="name another directory, or set train.resume = false"
            ) from exc


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
