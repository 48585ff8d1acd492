"""Scratch directories of servers: one a boot, locked for as long as its replica or supervisor lives.

The kernel drops the lock with the last of them, however they die; a later start collects what nobody could remove.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "evalfleet-engine-"
_LOCK = ".lock"
_YOUNG_S = 60.0  # it may be about to be locked


@dataclass(frozen=True, slots=True)
class Scratch:
    """A directory and the lock that says that it is used; `lock` is to be inherited by the supervisor."""

    path: Path
    lock: int

    @classmethod
    def make(cls) -> Scratch:
        """A new one; those that nobody uses any more are removed."""
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        collect(path.parent)
        return cls(path, lock)

    def remove(self) -> None:
        """Its server is gone."""
        with contextlib.suppress(OSError):
            os.close(self.lock)
        shutil.rmtree(self.path, ignore_errors=True)


def collect(place: Path) -> None:
    """Remove the scratch directories of replicas that died together with their supervisors."""
    for path in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if _is_unused(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_unused(path: Path) -> bool:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        return time.time() - path.stat().st_mtime > _YOUNG_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
