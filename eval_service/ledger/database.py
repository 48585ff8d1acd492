"""The connection to the ledger, its transactions, and the epoch fence.

Invariant: every write of a controller goes through `acting(epoch)`, which holds the ledger's write lock while it
compares the epoch, so a controller that was replaced writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, func, insert, inspect, select, update

from eval_service.contract.errors import ConfigError, EvalfleetError
from eval_service.ledger.migrations import migrate
from eval_service.ledger.place import check_local, read_mounts
from eval_service.ledger.postgres import CHANGES
from eval_service.ledger.schema import SCHEMA_VERSION, alembic_version, meta, metadata
from eval_service.ledger.store import file_of, open_store, parsed

EPOCH = "epoch"
VERSION = "schema_version"
CONTROLLER_AT = "controller_at"
FLEET = "fleet"
COLLECTED = "collected"
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
        ConfigError: a SQLite file on a network file system, a ledger of a later version, or a URL that can't be one.
        Unavailable: it can't be reached.
    """

    def __init__(
        self, url: str, *, clock: Callable[[], float] = time.time, mounts: Callable[[], str] = read_mounts
    ) -> None:
        self.url = url
        self.clock = clock
        known = parsed(url)
        self.remote = known.get_backend_name() != "sqlite"  # it may be away, and come back
        if (file := file_of(known)) is not None:
            check_local(file, mounts=mounts)
        self.store = open_store(known)
        self.engine = self.store.engine
        try:
            with self.reading() as connection:
                found = version_of(connection)
            if found != SCHEMA_VERSION:
                self._shape()
        except BaseException:
            self.close()
            raise

    def _shape(self) -> None:
        """Make the tables, or bring those of an older version up to date."""
        with self.store.shaping() as connection:
            found = version_of(connection)  # by now somebody else may have done it
            if found is None:
                metadata.create_all(connection)
                connection.execute(insert(alembic_version).values(version_num=f"{SCHEMA_VERSION:04}"))
            elif found > SCHEMA_VERSION:
                raise ConfigError(
                    f"the ledger has schema {found}; this version knows those up to {SCHEMA_VERSION}",
                    field="service.ledger",
                    hint="serve it with the version that wrote it or a later one, or set another ledger",
                )
            elif found < SCHEMA_VERSION:
                migrate(connection, found)
            for key in (EPOCH, CHANGES):
                _seed(connection, key, "0", self.clock())
            put(connection, VERSION, str(SCHEMA_VERSION), self.clock())

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A read; each of its statements sees what was committed before."""
        with self.store.reading() as connection:
            yield connection

    @contextmanager
    def writing(self, over: Connection | None = None, *, durable: bool = False) -> Iterator[Connection]:
        """A write transaction; the one write lock is taken at once.

        Args:
            over: a connection that the caller keeps; None: one of the pool.
            durable: a power cut takes neither this nor anything that was committed before it.
        """
        with self.store.writing(over, durable=durable) as connection:
            yield connection

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
        found = connection.execute(select(meta.c.value).where(meta.c.key == EPOCH)).scalar_one()
        if int(found) != epoch:
            raise Fenced(f"epoch {epoch} is over; {found} acts")

    def take_epoch(self) -> int:
        """Raise the epoch and return it; only the holder of the lock may call this."""
        with self.writing(durable=True) as connection:
            found = connection.execute(select(meta.c.value).where(meta.c.key == EPOCH)).scalar_one()
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
        self.store.checkpoint()

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()


def put(connection: Connection, key: str, value: str, at: float) -> None:
    """Write one of `meta`'s values."""
    if connection.execute(update(meta).where(meta.c.key == key).values(value=value, at=at)).rowcount == 0:
        connection.execute(insert(meta).values(key=key, value=value, at=at))


def version_of(connection: Connection) -> int | None:
    """Of the ledger that is there; None: there is none yet.

    Raises:
        ConfigError: the tables are none that any version wrote.
    """
    there = set(inspect(connection).get_table_names())
    text = _get(connection, VERSION) if meta.name in there else None
    if text is not None and text.isdecimal():
        return int(text)
    if meta.name in there and connection.execute(select(func.count()).select_from(meta)).scalar_one():
        raise ConfigError(f"the ledger has schema {text!r}, which is none", field="service.ledger")
    if not there & metadata.tables.keys() - {meta.name}:
        return None
    raise ConfigError(
        f"the database has tables of another's: {', '.join(sorted(there & metadata.tables.keys()))}",
        field="service.ledger",
        hint="give the ledger a database of its own, or a schema: ?options=-csearch_path%3Devalfleet",
    )


def _seed(connection: Connection, key: str, value: str, at: float) -> None:
    if _get(connection, key) is None:
        connection.execute(insert(meta).values(key=key, value=value, at=at))


def _get(connection: Connection, key: str) -> str | None:
    return connection.execute(select(meta.c.value).where(meta.c.key == key)).scalar_one_or_none()
