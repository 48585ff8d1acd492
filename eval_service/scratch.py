"""Scratch directories in the host's place for temporary files, locked for as long as whoever made them lives.

The kernel drops the lock with the last process that has it, however that dies; a later start of an engine or of the
service collects what nobody could remove. What carries no lock of ours is never touched, but for an empty directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_LOCK = ".lock"
_YOUNG_S = 60.0  # it may be about to be locked


class Kind(StrEnum):
    """What a directory is for, and what its name begins with; short ones, since sockets lie in some."""

    ENGINE = "evalfleet-engine-"
    RAY = "evalfleet-ray-"
    ATTEMPT = "evalfleet-attempt-"
    CODE = "evalfleet-code-"
    DOCTOR = "evalfleet-doctor-"
    CHAOS = "evalfleet-chaos-"
    CHAOS_TEMP = "ef-"


@dataclass(frozen=True, slots=True)
class Scratch:
    """A directory and the lock that says that it is used; `lock` may be inherited by who uses it, too."""

    path: Path
    lock: int

    @classmethod
    def make(cls, kind: Kind) -> Scratch:
        """A new one."""
        path = Path(tempfile.mkdtemp(prefix=kind))
        coming = path / f"{_LOCK}.new"
        lock = os.open(coming, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        coming.rename(path / _LOCK)  # whoever collects never sees it without its lock
        return cls(path, lock)

    def remove(self) -> None:
        """Nobody needs it any more."""
        with contextlib.suppress(OSError):
            os.close(self.lock)
        _remove(self.path)


@contextmanager
def scratch(kind: Kind) -> Iterator[Path]:
    """An empty directory for as long as the context."""
    held = Scratch.make(kind)
    try:
        place = held.path / "in"
        place.mkdir()
        yield place
    finally:
        held.remove()


def collect(place: Path | None = None) -> None:
    """Remove the scratch directories whose users have died, from where temporary files are, or from `place`."""
    place = place or Path(tempfile.gettempdir())
    for kind in Kind:
        for path in place.glob(f"{kind}*"):
            with contextlib.suppress(OSError):
                _collect(path)


def _collect(path: Path) -> None:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        if time.time() - path.stat().st_mtime > _YOUNG_S:
            path.rmdir()  # only if it is empty: else it is not ours
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    """Delete it, the lock's file last: whoever is killed on the way, or has somebody add to it, leaves it collectable.

    engine/supervisor.py, which imports nothing of ours, does as much.
    """
    with contextlib.suppress(OSError):
        for entry in list(path.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _LOCK:
                with contextlib.suppress(OSError):  # one that can't go keeps no other
                    entry.unlink()
        if [entry.name for entry in path.iterdir()] in ([], [_LOCK]):
            (path / _LOCK).unlink(missing_ok=True)
            path.rmdir()
