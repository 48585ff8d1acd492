"""The trainer's own checkpoints on disk: `<save_dir>/step_<step>/`, and `save_hf` directories beside them.

Invariants: a directory under its final name is whole: it is written as `.partial-<run>-<nonce>`, synced, and renamed
when every rank is done; megatron's `metadata.json` is its last file, and what lacks it is no checkpoint. One that goes
is renamed before it is deleted. A `save_hf` directory lies at `<save_dir>/hf/<run>/step_<step>-<digest8>/`, with the
manifest and marker of a snapshot; nothing here ever deletes one.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from eval_service.contract import names

FIELD = "train.save_dir"
LAST_FILE = "metadata.json"
_NAME = re.compile(r"step_(\d{1,12})")


@dataclass(frozen=True, slots=True)
class CheckpointStore:
    """The checkpoints of one run; `keep` is how many of the newest are left, None: all."""

    directory: Path
    run: str
    keep: int | None = None

    @property
    def hf_root(self) -> Path:
        """The root of the `save_hf` directories."""
        return self.directory / "hf"

    def path(self, step: int) -> Path:
        """Where a step's checkpoint is."""
        return self.directory / f"step_{step}"

    def steps(self) -> list[int]:
        """The steps of the whole checkpoints, in order."""
        if not self.directory.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.directory.iterdir() if (path / LAST_FILE).is_file())
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> int | None:
        """The step of the newest checkpoint; None: there is none."""
        return max(self.steps(), default=None)

    def begin(self) -> Path:
        """A new directory to write into."""
        partial = self.directory / f".partial-{self.run}-{uuid.uuid4().hex}"
        partial.mkdir(parents=True)
        return partial

    def publish(self, partial: Path, step: int) -> Path:
        """Give a written directory its name; what had it (and was not whole, or is of another past) goes."""
        for path in sorted(partial.iterdir()):
            _sync(path)
        _sync(partial)
        target = self.path(step)
        replaced = self._trash(target) if target.exists() else None
        partial.rename(target)
        _sync(self.directory)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        return target

    def rotate(self) -> list[int]:
        """Delete all but the newest `keep`; returns the steps that went. What can't go now goes with a later one."""
        gone = []
        for step in self.steps()[: -self.keep] if self.keep is not None else []:
            with suppress(OSError):  # somebody else deletes it, say
                shutil.rmtree(self._trash(self.path(step)), ignore_errors=True)
                gone.append(step)
        return gone

    def sweep(self) -> list[Path]:
        """Delete what a killed launch left half-written or half-deleted, of this run alone; returns what went."""
        left = [path for kind in ("partial", "trash") for path in self.directory.glob(f".{kind}-{self.run}-*")]
        left += names.run_dir(self.hf_root, self.run).glob(f"{names.PARTIAL_PREFIX}*")
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        return left

    def _trash(self, path: Path) -> Path:
        return path.rename(self.directory / f".trash-{self.run}-{uuid.uuid4().hex}")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
