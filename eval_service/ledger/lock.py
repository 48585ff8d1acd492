"""The controller's lock.

Beside a SQLite file it is the kernel's, which drops it when the process dies. In PostgreSQL it is a lease, by the
server's clock: a session's lock would be kept by a process that hangs, or whose host is gone. Neither is what keeps a
controller that was replaced from writing; that is the epoch.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
import uuid
from pathlib import Path
from typing import Protocol

from sqlalchemy import URL, Engine, text
from sqlalchemy.exc import SQLAlchemyError

from eval_service.contract.errors import ConfigError
from eval_service.ledger.failures import mapped
from eval_service.ledger.postgres import open_engine
from eval_service.ledger.store import file_of, parsed

LEASE_S = 5.0  # a holder that has not shown itself for so long has lost it
RENEW_S = 1.0
_KEY = "lock"
_NOW = "extract(epoch FROM clock_timestamp())"
_TAKE = text(
    f"INSERT INTO meta (key, value, at) VALUES ('{_KEY}', :me, {_NOW}) ON CONFLICT (key) "
    f"DO UPDATE SET value = :me, at = {_NOW} WHERE meta.value = :me OR meta.at < {_NOW} - :lease_s RETURNING value"
)
# What was given up meanwhile stays so: a renewal that was under way finds nothing to renew.
_RENEW = text(f"UPDATE meta SET at = {_NOW} WHERE key = '{_KEY}' AND value = :me AND at > 0 RETURNING value")
_RELEASE = text(f"UPDATE meta SET at = 0 WHERE key = '{_KEY}' AND value = :me")
log = logging.getLogger(__name__)


class Lock(Protocol):
    """One controller's way to be the only one that acts."""

    @property
    def held(self) -> bool:
        """Whether this object holds it, as far as it knows."""

    def try_take(self) -> bool:
        """Take it if nobody has it; returns whether it is held now.

        Raises:
            Unavailable: that can't be asked now.
        """

    def release(self) -> None:
        """Give it up."""


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


class LeaseLock:
    """A row of `meta` that its holder renews from a thread; the tables must be there.

    Args:
        url: of a PostgreSQL ledger.
        lease_s: without a renewal; by the server's clock.
    """

    def __init__(self, url: URL, *, lease_s: float = LEASE_S) -> None:
        self._url = url
        self._lease_s = lease_s
        self._me = uuid.uuid4().hex
        self._engine: Engine | None = None
        self._released = threading.Event()  # of the renewing thread; each has its own
        self._renewing: threading.Thread | None = None
        self._held = False

    @property
    def held(self) -> bool:
        """Whether nobody else has taken it, as far as is known."""
        return self._held

    def try_take(self) -> bool:
        """See `Lock`."""
        if self._held:
            return True
        with mapped():
            if self._engine is None:
                self._engine = open_engine(self._url, 1)
            engine = self._engine
            with engine.begin() as connection:
                taken = connection.execute(_TAKE, {"me": self._me, "lease_s": self._lease_s}).first()
            self._held = taken is not None
        if self._held:
            self._released = threading.Event()
            self._renewing = threading.Thread(
                target=self._renew, args=(engine, self._released), name="lease", daemon=True
            )
            self._renewing.start()
        return self._held

    def release(self) -> None:
        """See `Lock`; where the server is away it ends with its time."""
        self._released.set()
        renewing, self._renewing = self._renewing, None
        if renewing is not None:
            renewing.join(RENEW_S)
        held, self._held = self._held, False
        engine, self._engine = self._engine, None
        if engine is None:
            return
        if held:
            with contextlib.suppress(SQLAlchemyError), engine.begin() as connection:
                connection.execute(_RELEASE, {"me": self._me})
        if renewing is None or not renewing.is_alive():
            engine.dispose()

    def _renew(self, engine: Engine, released: threading.Event) -> None:
        """Until it is released or lost; where it outlives the release, it closes the connections."""
        began = time.monotonic()
        while not released.wait(RENEW_S):
            try:
                with engine.begin() as connection:
                    renewed = connection.execute(_RENEW, {"me": self._me}).first() is not None
                if not renewed and not released.is_set():
                    log.warning("another controller took the lock, which was not renewed in time")
                    self._held = False
                    return
                began = time.monotonic()
            except SQLAlchemyError as exc:
                log.warning("the lock could not be renewed for %.1f s: %s", time.monotonic() - began, exc)
        engine.dispose()


def lock_of(url: str) -> Lock:
    """The lock that belongs to a ledger.

    Raises:
        ConfigError: for a ledger that has none.
    """
    known = parsed(url)
    if (file := file_of(known)) is not None:
        return FileLock(file.with_name(file.name + ".lock"))
    if known.get_backend_name() == "postgresql":
        return LeaseLock(known)
    raise ConfigError("a ledger in memory can't be locked", field="service.ledger", hint="name a file")
