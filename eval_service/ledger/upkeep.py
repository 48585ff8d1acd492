"""What an operator does to a ledger, with a service running or not: look at it, copy it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL, Connection, func, select

from eval_service.contract.errors import ConfigError, Conflict, Unavailable
from eval_service.ledger.database import CONTROLLER_AT, EPOCH, version_of
from eval_service.ledger.schema import SCHEMA_VERSION, meta, points, runs
from eval_service.ledger.store import file_of, open_store, parsed, without_password

_DUMP_S = 3600.0


@dataclass(frozen=True, slots=True)
class Survey:
    """What is known of a ledger without changing it."""

    url: str  # without its password
    schema: int | None  # None: there is no ledger yet
    newest: int  # the schema that this version writes
    epoch: int | None
    controller_at: float | None  # Unix seconds: when a controller showed itself last
    runs: int
    points: int


def survey(url: str) -> Survey:
    """Look at a ledger of any version; nothing is made and nothing brought up to date.

    Raises:
        ConfigError: it is no ledger.
        Unavailable: it can't be reached.
    """
    known = parsed(url)
    shown = known.render_as_string(hide_password=True)
    if (file := file_of(known)) is not None and not file.exists():
        return Survey(shown, None, SCHEMA_VERSION, None, None, 0, 0)
    store = open_store(known)
    try:
        with store.reading() as connection:
            return _surveyed(connection, shown)
    finally:
        store.engine.dispose()


def _surveyed(connection: Connection, shown: str) -> Survey:
    schema = version_of(connection)
    if schema is None:
        return Survey(shown, None, SCHEMA_VERSION, None, None, 0, 0)
    kept = {row.key: row for row in connection.execute(select(meta).where(meta.c.key.in_((EPOCH, CONTROLLER_AT))))}
    count = [connection.execute(select(func.count()).select_from(table)).scalar_one() for table in (runs, points)]
    epoch = int(kept[EPOCH].value) if EPOCH in kept else None
    seen = kept[CONTROLLER_AT].at if CONTROLLER_AT in kept else None
    return Survey(shown, schema, SCHEMA_VERSION, epoch, seen, *count)


def backup(url: str, target: Path) -> int:
    """Copy a ledger as it is at one moment, while others write to it; returns the copy's bytes.

    SQLite's is a SQLite file again, PostgreSQL's what `pg_restore` reads.

    Raises:
        Conflict: the target is there already.
        ConfigError: there is no such ledger, or no `pg_dump`.
        Unavailable: it could not be read, or written.
    """
    known = parsed(url)
    if target.exists():
        raise Conflict(f"{target} is there already", field="target", hint="name another file")
    with _whole(target) as partial:
        if (file := file_of(known)) is not None:
            _copy(file, partial)
        else:
            _dump(known, partial)
    return target.stat().st_size


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """A file beside the target that becomes it when it is whole; nobody else may read it."""
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        yield partial
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.rename(target)
    except OSError as exc:
        raise Unavailable(f"{target} can't be written: {exc}", field="target") from exc
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _copy(file: Path, target: Path) -> None:
    if not file.exists():
        raise ConfigError(f"there is no ledger at {file}", field="service.ledger")
    try:
        with (
            contextlib.closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as source,
            contextlib.closing(sqlite3.connect(target)) as copy,
        ):
            source.backup(copy)  # in one step: what others commit meanwhile would begin it anew
            (found,) = copy.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as exc:
        raise Unavailable(f"the ledger can't be copied now: {exc}", field="ledger") from exc
    if found != "ok":
        raise Unavailable(f"the copy is damaged, and so may the ledger be: {found}", field="ledger")


def _dump(url: URL, target: Path) -> None:
    """The password goes by the environment, which other users can't see."""
    program = shutil.which("pg_dump")
    plain = without_password(url.set(drivername="postgresql")).render_as_string()
    if program is None:
        hint = f"install PostgreSQL's client programs, or elsewhere: pg_dump -Fc --no-owner -f FILE '{plain}'"
        raise ConfigError("pg_dump, which copies a PostgreSQL ledger, is not on PATH", hint=hint)
    secret = {"PGPASSWORD": str(url.password)} if url.password else {}
    command = [program, "--format=custom", "--no-owner", "--no-password", f"--file={target}", f"--dbname={plain}"]
    try:
        done = subprocess.run(
            command, env={**os.environ, **secret}, capture_output=True, text=True, timeout=_DUMP_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"pg_dump took longer than {_DUMP_S:.0f} s", field="ledger") from None
    if done.returncode != 0:
        raise Unavailable(f"pg_dump: {done.stderr.strip()[-2000:]}", field="ledger")
