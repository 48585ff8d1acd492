"""The first engine on a host starts alone: it builds the JIT caches, which the others then find.

A lock of the kernel's says who that is: whoever starts with nobody there holds it alone until it is up, and shares it
for as long as it lives; others start while it is shared. It drops with the process, so nothing has to be tidied up.
Invariant: this only orders starts. Where the lock can't be had in time, or at all, the engine starts nevertheless.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path

from eval_service.engine.pin import Clock

_LOOK_S = 0.25
_log = logging.getLogger(__name__)


class StartLock:
    """One engine's hold on the host's lock; `close` lets go of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    async def turn(self, clock: Clock, timeout_s: float) -> bool:
        """Wait until this engine may start; whether it is the first."""
        until = clock.monotonic() + timeout_s
        self.close()
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            _log.warning("engines are not started one first: %s", exc)
            return False
        while clock.monotonic() < until:
            if self._take(fcntl.LOCK_EX):
                return True
            if self._take(fcntl.LOCK_SH):
                return False
            await clock.sleep(_LOOK_S)
        return False

    def up(self) -> None:
        """The engine is up, and others may start beside it."""
        self._take(fcntl.LOCK_SH)

    def close(self) -> None:
        """Let go."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _take(self, how: int) -> bool:
        with contextlib.suppress(OSError):
            if self._file is not None:
                fcntl.flock(self._file, how | fcntl.LOCK_NB)
                return True
        return False
