"""What differs between the databases that a ledger may be: how one connects, who writes, and what tells of a change.

Both have one writer at a time, who sees all that was committed before: what is read in a write transaction is true till
that ends, and numbers that are given out in it rise in the order of the commits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from eval_service.contract.errors import ConfigError
from eval_service.ledger.postgres import PostgresStore
from eval_service.ledger.sqlite import SqliteStore

_POSTGRES = frozenset({"postgres", "postgresql", "postgresql+psycopg"})
_KINDS = "sqlite:////path/ledger.db, or postgresql://user@host/database"


class Store(Protocol):
    """One kind of database, opened."""

    @property
    def engine(self) -> Engine:
        """Where connections come from."""

    @property
    def counts_own(self) -> bool:
        """Whether `number` counts what its own connection wrote, too."""

    def reading(self) -> AbstractContextManager[Connection]:
        """A connection that takes no lock and leaves no transaction open."""

    def writing(self, kept: Connection | None, *, durable: bool) -> AbstractContextManager[Connection]:
        """A write transaction; see `Database.writing`."""

    def shaping(self) -> AbstractContextManager[Connection]:
        """A transaction that makes or changes tables, alone."""

    def checkpoint(self) -> None:
        """See `Database.checkpoint`."""

    def number(self, connection: Connection) -> int:
        """A number that differs from the last one that this connection was told, if another one wrote since."""


def parsed(url: str) -> URL:
    """A ledger's URL, with the driver that is used for it.

    Raises:
        ConfigError: it is none, or of a database that a ledger can't be; what it is is not told, for it may hold a
            password.
    """
    try:
        found = make_url(url)
    except (ArgumentError, ValueError):
        hint = f"such as {_KINDS}; write a password's @ / : as %40 %2F %3A"
        raise ConfigError("this is no URL of a database", field="service.ledger", hint=hint) from None
    if found.drivername in _POSTGRES:
        if "password" in found.query:
            hint = "put it before the @, or leave it to PGPASSFILE"
            raise ConfigError("a password in the URL's query would be shown", field="service.ledger", hint=hint)
        return found.set(drivername="postgresql+psycopg")
    if found.drivername in {"sqlite", "sqlite+pysqlite"}:
        return found
    raise ConfigError(f"a ledger can't be {found.drivername}", field="service.ledger", hint=_KINDS)


def open_store(url: URL) -> Store:
    """Connect to what a URL names; the first connection is made when it is needed.

    Raises:
        ConfigError: the driver is not installed.
    """
    return SqliteStore(url) if url.get_backend_name() == "sqlite" else PostgresStore(url)


def without_password(url: URL) -> URL:
    """The same for who finds the password elsewhere (`URL.set` takes None for no change)."""
    return URL.create(url.drivername, url.username, None, url.host, url.port, url.database, url.query)


def file_of(url: URL) -> Path | None:
    """The file of a SQLite ledger; None where there is none."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None
