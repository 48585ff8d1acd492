"""A PostgreSQL server of the session's own: real, on a socket in a directory of its own, ended with it.

It refuses to run as root, so where the tests are root's it is another user's.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import URL, Engine

from eval_service.ledger import postgres as engines
from eval_service.ledger.database import EPOCH, Database
from eval_service.ledger.postgres import CHANGES
from eval_service.ledger.schema import alembic_version, meta, metadata

_PLACES = (Path("/usr/lib/postgresql"), Path("/usr/local/lib/postgresql"), Path("/opt/homebrew/opt"))
_START_S = 30.0
_PR_SET_PDEATHSIG = 1
_FAST = {"fsync": "off", "full_page_writes": "off", "autovacuum": "off", "max_connections": "60"}
_EMPTY = "; ".join(
    [
        *(f"DELETE FROM {table}" for table in reversed(metadata.sorted_tables) if table not in (meta, alembic_version)),
        "DELETE FROM meta WHERE key <> 'schema_version'",
        f"INSERT INTO meta VALUES ('{EPOCH}', '0', 0), ('{CHANGES}', '0', 0)",
        "ALTER SEQUENCE commands_seq_seq RESTART",
        "ALTER SEQUENCE events_seq_seq RESTART",
    ]
)


MISSING = "no PostgreSQL server is installed here (no initdb on PATH or under /usr/lib/postgresql)"


def programs() -> Path | None:
    """The directory of `initdb` and `postgres`; None where there is none."""
    if (found := shutil.which("initdb")) is not None:
        return Path(found).resolve().parent
    versions = (path.parent for place in _PLACES for path in place.glob("*/bin/initdb"))
    return max(versions, default=None)


class Server:
    """One server over one data directory; it may be ended and started again."""

    def __init__(self, base: Path, user: pwd.struct_passwd | None) -> None:
        found = programs()
        assert found is not None
        self._programs, self.base, self._user = found, base, user
        self._data = base / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self._kept: dict[str, psycopg.Connection[Any]] = {}
        self.engines: dict[URL, Engine] = {}
        self.opening = threading.Lock()
        self.made: set[str] = set()  # databases with an empty ledger in them
        self._run("initdb", "-D", str(self._data), "-U", "evalfleet", "-A", "trust", "-E", "UTF8", "--locale=C", "-N")

    def url(self, database: str = "postgres", *, password: str = "") -> str:
        """As `service.ledger` has it."""
        secret = f":{password}" if password else ""
        return f"postgresql://evalfleet{secret}@/{database}?host={self.base}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        settings = _FAST | {"listen_addresses": "", "unix_socket_directories": str(self.base)}
        flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (self.base / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._programs / "postgres"), "-D", str(self._data), *flags],
                **self._as_user(),
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - the tests' threads hold no lock that it needs
            )
        until = time.monotonic() + _START_S
        while True:
            try:
                self.sql("SELECT 1")
            except psycopg.OperationalError:
                assert time.monotonic() < until, (self.base / "log").read_text()
                time.sleep(0.02)
            else:
                return

    def end(self, how: signal.Signals = signal.SIGINT) -> None:
        """End it: in order, cutting every connection (SIGINT), or at once (SIGQUIT)."""
        if self._process is not None:
            for connection in self._kept.values():
                connection.close()
            self._kept.clear()
            self._process.send_signal(how)
            self._process.wait(timeout=_START_S)
            self._process = None

    def sql(self, statement: str, database: str = "postgres") -> list[Any]:
        """Run a statement of the test's own; its rows."""
        if database not in self._kept:
            self._kept[database] = psycopg.connect(
                host=str(self.base), user="evalfleet", dbname=database, autocommit=True, connect_timeout=5
            )
        done = self._kept[database].execute(statement)
        return done.fetchall() if done.description else []

    def cut(self, database: str) -> int:
        """Cut the connections to a database; how many."""
        query = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'"
        return len(self.sql(f"{query} AND pid <> pg_backend_pid()", database))

    def run(self, program: str, *arguments: str) -> str:
        """Run one of the server's own programs on it; what it wrote."""
        return self._run(program, "-h", str(self.base), "-U", "evalfleet", *arguments)

    def _run(self, program: str, *arguments: str) -> str:
        command = [str(self._programs / program), *arguments]
        done = subprocess.run(command, **self._as_user(), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    def _as_user(self) -> dict[str, Any]:
        environment = {**os.environ, "LC_ALL": "C"}
        if self._user is None:
            return {"cwd": self.base, "env": environment}
        ids = {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        return {"cwd": self.base, "env": environment, **ids}


@contextmanager
def server() -> Iterator[Server]:
    """A server, started; what it wrote goes with it."""
    user = _other_user() if os.getuid() == 0 else None
    base = Path(tempfile.mkdtemp(prefix="evalfleet-pg-"))  # not pytest's, whose path is long and closed to others
    made: Server | None = None
    try:
        if user is not None:
            os.chown(base, user.pw_uid, user.pw_gid)
        made = Server(base, user)
        made.start()
        yield made
    finally:
        if made is not None:
            for engine in made.engines.values():
                Engine.dispose(engine)
            made.end(signal.SIGQUIT)
        shutil.rmtree(base, ignore_errors=True)


@contextmanager
def emptied(running: Server, database: str) -> Iterator[str]:
    """The URL of a ledger with nothing in it.

    All who open one share an engine: to compile statements anew and to connect is most of what a test would take.
    """
    opens = engines.open_engine

    def shared(url: URL, size: int) -> Engine:
        with running.opening:
            if url not in running.engines:
                running.engines[url] = engine = opens(url, size)
                # One who is done with it takes no connection from the others: what they hold would never be closed.
                engine.dispose = lambda close=True: None  # type: ignore[method-assign]
            return running.engines[url]

    if database not in running.made:
        running.sql(f"CREATE DATABASE {database}")
        Database(running.url(database)).close()
        running.made.add(database)
    else:
        running.sql(_EMPTY, database)
    engines.open_engine = shared
    try:
        yield running.url(database)
    finally:
        engines.open_engine = opens


def _other_user() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT, 0, 0, 0)
