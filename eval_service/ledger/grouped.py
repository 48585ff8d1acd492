"""Writes of many callers in one transaction: what comes while one is being committed shares the next.

Invariants: each piece of work sees what those before it wrote, and is undone alone when it fails, unless the ledger
itself does; nobody is answered before the commit. One thread writes, so that callers wait for the ledger and not for
one another's turn at it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from eval_service.contract.errors import Unavailable
from eval_service.ledger.database import Database

MOST = 64  # in one transaction: how long other writers have to wait for it
MOST_WAITING = 2000
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[Connection], Any]
    future: Future[Any]


class GroupedWrites:
    """Runs work within write transactions of its own thread, which starts with the first and ends with `close`."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._jobs: queue.Queue[_Job | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def submit(self, work: Callable[[Connection], _T]) -> Future[_T]:
        """Have work done; the future has what it returned once that is committed, or what it raised.

        Raises:
            Unavailable: too many wait already.
        """
        future: Future[_T] = Future()
        self._start()
        try:
            self._jobs.put_nowait(_Job(work, future))
        except queue.Full:
            raise Unavailable(f"{MOST_WAITING} writes wait for the ledger", field="ledger") from None
        return future

    def close(self) -> None:
        """Let what was submitted be done, and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _start(self) -> None:
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="grouped-writes", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        while (first := self._jobs.get()) is not None:
            jobs, ends = self._with_those_that_wait(first)
            self._do([job for job in jobs if job.future.set_running_or_notify_cancel()])
            if ends:
                return

    def _with_those_that_wait(self, first: _Job) -> tuple[list[_Job], bool]:
        jobs = [first]
        while len(jobs) < MOST:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is None:
                return jobs, True
            jobs.append(job)
        return jobs, False

    def _do(self, jobs: Sequence[_Job]) -> None:
        done: list[tuple[_Job, Any]] = []
        failed: list[tuple[_Job, Exception]] = []
        try:
            with self._db.writing() as connection:
                for job in jobs:
                    try:
                        done.append((job, _alone(connection, job.work)))
                    except OperationalError:  # such as a full disk: SQLite may have undone what came before it too
                        raise
                    except Exception as exc:  # noqa: BLE001 - of one caller's work: raised where it is waited for
                        failed.append((job, exc))
        except Exception as exc:  # noqa: BLE001 - nothing was committed: everybody is told
            done, failed = [], [(job, exc) for job in jobs]
        for job, result in done:
            job.future.set_result(result)
        for job, error in failed:
            job.future.set_exception(error)


def _alone(connection: Connection, work: Callable[[Connection], _T]) -> _T:
    """Do one piece of work; what it wrote is undone where it fails."""
    connection.exec_driver_sql("SAVEPOINT one")
    try:
        result = work(connection)
    except OperationalError:  # there may be no savepoint any more: the whole transaction is given up
        raise
    except Exception:
        connection.exec_driver_sql("ROLLBACK TO SAVEPOINT one")
        connection.exec_driver_sql("RELEASE SAVEPOINT one")
        raise
    connection.exec_driver_sql("RELEASE SAVEPOINT one")
    return result
