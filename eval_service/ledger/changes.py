"""Whether others wrote to the ledger since one asked last; a question that costs microseconds and takes no lock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from eval_service.contract.errors import Unavailable
from eval_service.ledger.database import Database
from eval_service.ledger.failures import mapped


class Changes:
    """Answers with a number that differs from the last one if the ledger was written to, by anybody.

    What is written over its own connection does not count.
    """

    def __init__(self, database: Database) -> None:
        self._db = database
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._own = 0  # writes that the number counts, and that are no change
        self._generation = 0  # of the connection: SQLite counts anew for each

    def __call__(self) -> int:
        """The number; from any thread.

        Raises:
            Unavailable: the ledger can't be read.
        """
        with self._lock, mapped():
            try:
                return (self._generation << 64) + self._db.store.number(self._kept()) - self._own
            except Exception:
                self._drop()
                raise

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A write transaction that is no change to whoever asks here."""
        with self._lock:
            try:
                with mapped():
                    connection = self._kept()
                with self._db.writing(connection):
                    yield connection
                self._own += self._db.store.counts_own
            except Unavailable:
                self._drop()
                raise

    def close(self) -> None:
        """Give the connection back."""
        with self._lock:
            self._drop()

    def _kept(self) -> Connection:
        if self._connection is None:
            self._connection = self._db.engine.connect()
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._generation += 1
            self._connection.invalidate()
            self._connection.close()
            self._connection = None
