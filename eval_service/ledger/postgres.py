"""A ledger in a PostgreSQL database.

Invariants: a row of `meta` is the write lock, so that there is one writer at a time as on SQLite, and counts changes.
A commit whose answer is lost is asked for: PostgreSQL knows what became of a transaction by its number. Who hangs
holds others up for no longer than `HUNG_S`, be it in a transaction or with a connection that nobody answers on.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, func, select, text, update
from sqlalchemy.exc import DBAPIError

from eval_service.contract.errors import ConfigError
from eval_service.ledger.failures import mapped
from eval_service.ledger.schema import meta

CHANGES = "changes"  # the row's key
BUSY_TIMEOUT_S = 10.0  # how long a writer waits for others
HUNG_S = 5.0  # a session that leaves its transaction idle for so long is ended
ASKED_S = HUNG_S + 2.0  # for so long it is asked what became of a commit; by then a session that waits for it has ended
_STATEMENT_S = 60.0
_AGAIN_S = 0.1
_OLDEST = (13,)
_POOL = 8  # connections that are kept, and as many more for a moment; a server has 100 unless told otherwise
# A peer whose host is gone is noticed by both sides.
_CONNECT = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "application_name": "evalfleet",
}
_SESSION = {
    "lock_timeout": f"{BUSY_TIMEOUT_S:.0f}s",
    "idle_in_transaction_session_timeout": f"{HUNG_S:.0f}s",
    "statement_timeout": f"{_STATEMENT_S:.0f}s",
    "tcp_keepalives_idle": "5s",
    "tcp_keepalives_interval": "2s",
    "tcp_keepalives_count": "3",
}
_TUNE = "SELECT " + ", ".join(f"set_config('{name}', '{value}', false)" for name, value in _SESSION.items())
_NUMBER = func.pg_current_xact_id().cast(meta.c.value.type)
_MORE = text("(CAST(value AS bigint) + 1)::text")
_LOCK = update(meta).where(meta.c.key == CHANGES).values(value=_MORE).returning(_NUMBER)
_CHANGES = select(meta.c.value).where(meta.c.key == CHANGES)
_UNBOUNDED = text(
    "SELECT set_config('statement_timeout', '0', true), set_config('idle_in_transaction_session_timeout', '0', true)"
)
_SHAPE = text("SELECT pg_advisory_xact_lock(hashtext('evalfleet ledger ' || current_schema()))")
_BECAME = text("SELECT pg_xact_status(CAST(CAST(:number AS text) AS xid8))")
log = logging.getLogger(__name__)


class PostgresStore:
    """See `Store`.

    Raises:
        ConfigError: the driver is not installed.
    """

    counts_own = True

    def __init__(self, url: URL) -> None:
        self.engine = open_engine(url, _POOL)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """See `Store`."""
        with mapped(), self.engine.connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")

    @contextmanager
    def writing(self, kept: Connection | None, *, durable: bool) -> Iterator[Connection]:
        """See `Store`; every commit is durable, as the server is set."""
        del durable
        with mapped(), nullcontext(kept) if kept is not None else self.engine.connect() as connection:
            with _undone(connection):
                number = connection.execute(_LOCK).scalar_one()
                yield connection
            self._commit(connection, str(number))

    @contextmanager
    def shaping(self) -> Iterator[Connection]:
        """See `Store`."""
        with mapped(), self.engine.connect() as connection, _undone(connection):
            _check(connection)
            connection.execute(_UNBOUNDED)
            connection.execute(_SHAPE)
            yield connection
            connection.commit()

    def checkpoint(self) -> None:
        """See `Store`; the server's own business."""

    def number(self, connection: Connection) -> int:
        """See `Store`."""
        with _undone(connection):
            found = connection.execute(_CHANGES).scalar_one()
        connection.rollback()
        return int(found)

    def _commit(self, connection: Connection, number: str) -> None:
        try:
            connection.commit()
        except DBAPIError as exc:
            connection.invalidate()
            if not exc.connection_invalidated or self._became(number) != "committed":
                raise
            connection.rollback()  # of nothing: whoever keeps it may go on with a new one beneath
            log.warning("the ledger's connection was lost with the answer to a commit, which was made")
        except BaseException:
            connection.invalidate()  # back in the pool it would go on with what was not committed
            raise

    def _became(self, number: str) -> str | None:
        """What became of a transaction; None where that can't be told in time."""
        until = time.monotonic() + ASKED_S
        while True:
            try:
                with self.engine.connect() as connection:
                    found: str | None = connection.execute(_BECAME, {"number": number}).scalar_one()
            except DBAPIError:
                found = "in progress"
            if found != "in progress":
                return found
            if time.monotonic() >= until:
                return None
            time.sleep(_AGAIN_S)


def _check(connection: Connection) -> None:
    """Refuse a server, or a database, that a ledger can't be in."""
    encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
    if encoding != "UTF8":
        hint = "CREATE DATABASE evalfleet ENCODING 'UTF8' TEMPLATE template0"
        raise ConfigError(f"the database's encoding is {encoding}, not UTF8", field="service.ledger", hint=hint)
    version = connection.dialect.server_version_info or (0,)
    if version < _OLDEST:
        raise ConfigError(
            f"the server is PostgreSQL {version[0]}", field="service.ledger", hint="13 or later is needed"
        )


def open_engine(url: URL, size: int) -> Engine:
    """Connections whose sessions are bounded; see the module's docstring.

    Raises:
        ConfigError: the driver is not installed.
    """
    if importlib.util.find_spec("psycopg") is None:
        hint = "pip install 'evalfleet[postgres]'"
        raise ConfigError("psycopg, the driver of PostgreSQL, is not installed", field="service.ledger", hint=hint)
    arguments: dict[str, Any] = {name: value for name, value in _CONNECT.items() if name not in url.query}
    # Plans that are kept on a server are lost where a pooler stands before it.
    arguments["prepare_threshold"] = None
    engine = create_engine(
        url, connect_args=arguments, pool_size=size, max_overflow=size, pool_timeout=BUSY_TIMEOUT_S, pool_pre_ping=True
    )
    event.listen(engine, "connect", _tune)
    return engine


def _tune(connection: Any, _record: Any) -> None:
    from psycopg.types.string import StrDumper

    class Plain(StrDumper):
        """SQLite keeps a NUL in a text; PostgreSQL can't."""

        def dump(self, obj: str) -> Any:
            return super().dump(obj.replace("\0", "\ufffd"))

    connection.adapters.register_dumper(str, Plain)
    connection.autocommit = True
    connection.execute(_TUNE)
    connection.autocommit = False


@contextmanager
def _undone(connection: Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.rollback()
        raise
