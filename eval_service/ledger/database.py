"""The connection to the ledger, its transactions, and the epoch fence.

Invariant: every write of a controller goes through `acting(epoch)`, which holds the ledger's write lock while it
compares the epoch, so a controller that was replaced writes nothing.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, insert, inspect, select, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from eval_service.contract.errors import ConfigError, EvalfleetError, Unavailable
from eval_service.ledger.place import check_local, read_mounts
from eval_service.ledger.schema import ADDED, SCHEMA_VERSION, meta, metadata

EPOCH = "epoch"
VERSION = "schema_version"
CONTROLLER_AT = "controller_at"
FLEET = "fleet"
COLLECTED = "collected"
BUSY_TIMEOUT_S = 10.0  # how long a writer waits for others
_SYNCHRONOUS = "PRAGMA synchronous=NORMAL"
_MOST_WAL_PAGES = 8192
CONTROLLER_SILENT_S = 5.0  # a controller that has not shown itself for so long is taken for dead


class Fenced(EvalfleetError):
    """Another controller acts now; this one must stop."""

    code = "fenced"
    status = 503


class Database:
    """Opens the ledger, creating what is not there.

    Args:
        url: an SQLAlchemy URL; `sqlite:////path/ledger.db` or `postgresql+psycopg://...`.
        clock: Unix seconds.
        mounts: the kernel's table of mounts.

    Raises:
        ConfigError: a SQLite file on a network file system, or a ledger of another version.
    """

    def __init__(
        self, url: str, *, clock: Callable[[], float] = time.time, mounts: Callable[[], str] = read_mounts
    ) -> None:
        self.url = url
        self.clock = clock
        parsed = make_url(url)
        if parsed.get_backend_name() == "sqlite" and parsed.database:
            check_local(Path(parsed.database), mounts=mounts)
        self.engine = _open(parsed)
        self._turnstile = threading.Lock()
        with self.reading() as connection:
            made = _is_made(connection)
        if not made:
            self._make()
        with self.reading() as connection:
            found = _get(connection, VERSION)
        if found != str(SCHEMA_VERSION):
            raise ConfigError(
                f"the ledger has schema {found}; this version writes {SCHEMA_VERSION}",
                field="service.ledger",
                hint="serve it with the version that wrote it, or set another service.state_dir",
            )

    def _make(self) -> None:
        with self.writing() as connection:
            metadata.create_all(connection)
            for index in (index for table in metadata.sorted_tables for index in table.indexes):
                index.create(connection, checkfirst=True)  # one that an older ledger's table lacks
            _seed(connection, VERSION, str(SCHEMA_VERSION), self.clock())
            _seed(connection, EPOCH, "0", self.clock())
            _migrated(connection, str(_get(connection, VERSION)), self.clock())

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A consistent read."""
        with mapped(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def writing(self, over: Connection | None = None, *, durable: bool = False) -> Iterator[Connection]:
        """A write transaction; SQLite takes its one write lock at once.

        Args:
            over: a connection that the caller keeps; None: one of the pool.
            durable: a power cut takes neither this nor anything that was committed before it.
        """
        sqlite = self.engine.dialect.name == "sqlite"
        with mapped(), self._in_turn(), self._connected(over) as connection:
            with _synced(connection) if sqlite and durable else nullcontext():
                if sqlite:
                    connection.exec_driver_sql("BEGIN IMMEDIATE")
                with _commit(connection):
                    yield connection

    def _connected(self, kept: Connection | None) -> AbstractContextManager[Connection]:
        return nullcontext(kept) if kept is not None else self.engine.connect()

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Of SQLite's writers each sleeps, for longer every time, if it finds another one; our own threads queue up."""
        if self.engine.dialect.name != "sqlite":
            yield
            return
        if not self._turnstile.acquire(timeout=BUSY_TIMEOUT_S):
            raise Unavailable(f"the ledger was busy for {BUSY_TIMEOUT_S:.0f} s", field="ledger")
        try:
            yield
        finally:
            self._turnstile.release()

    @contextmanager
    def acting(self, epoch: int, *, durable: bool = False) -> Iterator[Connection]:
        """A write transaction of the controller that took `epoch`; see `writing`.

        Raises:
            Fenced: the epoch has moved on.
        """
        with self.writing(durable=durable) as connection:
            self.fence(connection, epoch)
            yield connection

    @contextmanager
    def looking(self, epoch: int) -> Iterator[Connection]:
        """A consistent read of the controller that took `epoch`, without the write lock that gateways wait for.

        Raises:
            Fenced: the epoch has moved on.
        """
        with self.reading() as connection:
            self.fence(connection, epoch)
            yield connection

    def fence(self, connection: Connection, epoch: int) -> None:
        """Compare the epoch; in a write transaction nobody can raise it until that has ended.

        Raises:
            Fenced: the epoch has moved on.
        """
        found = connection.execute(select(meta.c.value).where(meta.c.key == EPOCH).with_for_update()).scalar_one()
        if int(found) != epoch:
            raise Fenced(f"epoch {epoch} is over; {found} acts")

    def take_epoch(self) -> int:
        """Raise the epoch and return it; only the holder of the lock may call this."""
        with self.writing(durable=True) as connection:
            found = connection.execute(select(meta.c.value).where(meta.c.key == EPOCH).with_for_update()).scalar_one()
            epoch = int(found) + 1
            put(connection, EPOCH, str(epoch), self.clock())
        return epoch

    def read_meta(self, key: str) -> tuple[str, float] | None:
        """One of `meta`'s values, with the time at which it was written."""
        with self.reading() as connection:
            row = connection.execute(select(meta.c.value, meta.c.at).where(meta.c.key == key)).one_or_none()
        return (row.value, row.at) if row else None

    def checkpoint(self) -> None:
        """Bring what was committed to where a power cut can't take it; nobody's reads or writes wait for it."""
        if self.engine.dialect.name == "sqlite":
            with mapped(), self.engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)")

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()


def put(connection: Connection, key: str, value: str, at: float) -> None:
    """Write one of `meta`'s values."""
    if connection.execute(update(meta).where(meta.c.key == key).values(value=value, at=at)).rowcount == 0:
        connection.execute(insert(meta).values(key=key, value=value, at=at))


def _migrated(connection: Connection, found: str, now: float) -> str:
    """Bring an older ledger up to date, as far as there is a way; returns the version that it has then."""
    while found.isdecimal() and (columns := ADDED.get(int(found) + 1)):
        for column in columns:
            there = {known["name"] for known in inspect(connection).get_columns(column.table.name)}
            if column.name not in there:
                kind = column.type.compile(connection.dialect)
                connection.exec_driver_sql(f"ALTER TABLE {column.table.name} ADD COLUMN {column.name} {kind}")
        found = str(int(found) + 1)
        put(connection, VERSION, found, now)
    return found


def _is_made(connection: Connection) -> bool:
    """Whether nothing is missing, so that it can be opened without the write lock, which a hung process may hold."""
    there = inspect(connection)
    if not set(there.get_table_names()) >= metadata.tables.keys():
        return False
    for table in metadata.sorted_tables:
        if not {index["name"] for index in there.get_indexes(table.name)} >= {index.name for index in table.indexes}:
            return False
    return _get(connection, EPOCH) is not None and _get(connection, VERSION) == str(SCHEMA_VERSION)


def _seed(connection: Connection, key: str, value: str, at: float) -> None:
    if _get(connection, key) is None:
        connection.execute(insert(meta).values(key=key, value=value, at=at))


def _get(connection: Connection, key: str) -> str | None:
    return connection.execute(select(meta.c.value).where(meta.c.key == key)).scalar_one_or_none()


def _open(parsed: URL) -> Engine:
    if parsed.get_backend_name() != "sqlite":
        return create_engine(parsed, pool_pre_ping=True)
    arguments = {"timeout": BUSY_TIMEOUT_S, "check_same_thread": False}
    # More than threads that may want one: a gateway has some 50 at most.
    engine = create_engine(parsed, connect_args=arguments, pool_size=16, max_overflow=64)

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


@contextmanager
def mapped() -> Iterator[None]:
    try:
        yield
    except DBAPIError as exc:
        raise Unavailable(f"the ledger can't be used now: {exc.orig}", field="ledger") from exc
    except PoolTimeout as exc:
        raise Unavailable(f"the ledger can't be used now: {exc}", field="ledger") from exc
