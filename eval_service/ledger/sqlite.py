"""A ledger in a SQLite file: the file's own lock makes one writer, and the file counts its changes."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event

from eval_service.contract.errors import Unavailable
from eval_service.ledger.failures import mapped

BUSY_TIMEOUT_S = 10.0  # how long a writer waits for others
_SYNCHRONOUS = "PRAGMA synchronous=NORMAL"
# A commit that comes to so many makes a checkpoint itself, and all writers wait for it: 512 MB, more than any write
# between two of the controller's. What a burst took is given back to the disk but for 32 MB.
_MOST_WAL_PAGES = 131072
_KEPT_WAL_BYTES = 32 << 20


class SqliteStore:
    """See `Store`."""

    counts_own = False

    def __init__(self, url: URL) -> None:
        self.engine = _open(url)
        self._turnstile = threading.Lock()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """See `Store`."""
        with mapped(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def writing(self, kept: Connection | None, *, durable: bool) -> Iterator[Connection]:
        """See `Store`; the one write lock is taken at once."""
        with mapped(), self._in_turn(), nullcontext(kept) if kept is not None else self.engine.connect() as connection:
            with _synced(connection) if durable else nullcontext():
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                with _commit(connection):
                    yield connection

    @contextmanager
    def shaping(self) -> Iterator[Connection]:
        """See `Store`. A table that is made anew is dropped for a moment, which no other row may hinder."""
        with mapped(), self._in_turn(), self.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA foreign_keys=OFF")
            try:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                with _commit(connection):
                    yield connection
            finally:
                connection.invalidate()  # the next one has them on

    def checkpoint(self) -> None:
        """See `Store`."""
        with mapped(), self.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)")

    def number(self, connection: Connection) -> int:
        """See `Store`."""
        return int(connection.exec_driver_sql("PRAGMA data_version").scalar_one())

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Writers each sleep, for longer every time, if they find another one; our own threads queue up."""
        if not self._turnstile.acquire(timeout=BUSY_TIMEOUT_S):
            raise Unavailable(f"the ledger was busy for {BUSY_TIMEOUT_S:.0f} s", field="ledger")
        try:
            yield
        finally:
            self._turnstile.release()


def _open(url: URL) -> Engine:
    arguments = {"timeout": BUSY_TIMEOUT_S, "check_same_thread": False}
    # More than threads that may want one: a gateway has some 50 at most.
    engine = create_engine(url, connect_args=arguments, pool_size=16, max_overflow=64)

    @event.listens_for(engine, "connect")
    def _tune(connection: sqlite3.Connection, _record: Any) -> None:
        # The driver's own BEGIN would be deferred, and two writers that both began by reading would deadlock.
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode=WAL")
        # What is committed outlives the process, also by kill -9. A power cut takes what came after the last
        # checkpoint, which the controller makes every few seconds; a sync within each commit took longer than all else
        # of a dispatch.
        connection.execute(_SYNCHRONOUS)
        connection.execute(f"PRAGMA wal_autocheckpoint={_MOST_WAL_PAGES}")  # where no controller makes them
        connection.execute(f"PRAGMA journal_size_limit={_KEPT_WAL_BYTES}")
        connection.execute("PRAGMA foreign_keys=ON")

    return engine


@contextmanager
def _synced(connection: Connection) -> Iterator[None]:
    connection.exec_driver_sql("PRAGMA synchronous=FULL")
    try:
        yield
    finally:
        if not connection.invalidated:
            connection.exec_driver_sql(_SYNCHRONOUS)


@contextmanager
def _commit(connection: Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.rollback()
        raise
    try:
        connection.commit()
    except BaseException:
        connection.invalidate()  # back in the pool it would go on with what was not committed
        raise
