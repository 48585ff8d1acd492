"""The demo's output directory.

Invariant: nothing is ever deleted but in a directory that carries our marker, and the marker is locked while a demo
writes there.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from eval_service.contract import names
from eval_service.contract.errors import ConfigError

MARKER = ".evalfleet-demo"


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where things lie; `out` is absolute."""

    out: Path

    @property
    def model(self) -> Path:
        """The base model."""
        return self.out / "model"

    @property
    def data(self) -> Path:
        """Training and held-out sets."""
        return self.out / "data"

    @property
    def snapshots(self) -> Path:
        """The root under which the run's snapshots are published."""
        return self.out / "snapshots"

    @property
    def train_output(self) -> Path:
        """The trainer's own output: its step log, its resolved config."""
        return self.out / "train"

    def config(self, name: str) -> Path:
        """`fleet`, `suites` or `run`."""
        return self.out / f"{name}.toml"

    def log(self, name: str) -> Path:
        """What a child process prints."""
        return self.out / "logs" / f"{name}.log"

    def kept(self, run: str) -> list[str]:
        """Names of the run's published snapshots, by step."""
        found = [(names.parse_step_dir(path.name), path.name) for path in names.run_dir(self.snapshots, run).glob("*")]
        return [name for parsed, name in sorted((p.step, n) for p, n in found if p is not None)]

    def partial(self) -> list[str]:
        """Directories that are half written or half deleted."""
        prefixes = (names.PARTIAL_PREFIX, names.TRASH_PREFIX)
        return sorted(str(path) for path in self.snapshots.glob("*/.*") if path.name.startswith(prefixes))


@contextmanager
def fresh(out: Path) -> Iterator[Workspace]:
    """An empty workspace of our own; a former demo's output there is removed.

    Raises:
        ConfigError: the directory holds something that no demo wrote, or another demo is writing there.
    """
    out = out.resolve()
    _refuse_strangers(out)
    out.mkdir(parents=True, exist_ok=True)
    with (out / MARKER).open("a") as marker:
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise ConfigError(f"another demo is writing to {out}", field="--out", hint="name another") from exc
        _clear(out)
        (out / "logs").mkdir()
        yield Workspace(out)


def _refuse_strangers(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is not a directory", field="--out", hint="name a directory")
    if out.is_dir() and any(out.iterdir()) and not (out / MARKER).is_file():
        raise ConfigError(
            f"{out} holds files that no demo wrote", field="--out", hint="name a new or empty directory, or empty it"
        )


def _clear(out: Path) -> None:
    for path in out.iterdir():
        if path.name == MARKER:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
