"""The controller's lock: the kernel drops it when the process dies; there is no time-to-live."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from sqlalchemy.engine import make_url

from eval_service.contract.errors import ConfigError


class FileLock:
    """An exclusive `flock` on a file beside the ledger.

    The descriptor is not inherited over exec, so no child keeps the lock when the controller dies.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds it."""
        return self._handle is not None

    def try_take(self) -> bool:
        """Take it if nobody has it; returns whether it is held now."""
        if self._handle is not None:
            return True
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        self._handle = handle
        return True

    def release(self) -> None:
        """Give it up."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def lock_of(url: str) -> FileLock:
    """The lock that belongs to a ledger.

    Raises:
        ConfigError: for a ledger that has no lock here yet.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        return FileLock(Path(parsed.database + ".lock"))
    raise ConfigError(
        f"a {parsed.get_backend_name()} ledger can't be locked by this version",
        field="service.ledger",
        hint="leave it out for SQLite on the local disk",
    )
