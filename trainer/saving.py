"""Saves checkpoints behind training: a step waits for the copy to the host, the rest is a thread's.

Invariants: whether a save came about is agreed by all ranks, whatever one of them met, and is never an exception in the
training thread: a save that failed is recorded, its directory is gone, and `fault` says so until another succeeds.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from trainer.background import Background
from trainer.checkpoint import CheckpointStore
from trainer.crash import crash_point
from trainer.parallel import TIMEOUT, Ranks
from trainer.sharding import Shards, begin_save, end_save
from trainer.steplog import StepLog

_Value = TypeVar("_Value")


class SaveFailed(Exception):
    """The last checkpoint could not be written."""


@dataclass(slots=True)
class CheckpointWriter:
    """One a rank. `last` is the step of the newest checkpoint that this launch has published."""

    store: CheckpointStore
    ranks: Ranks
    log: StepLog | None = None
    clock: Callable[[], float] = time.monotonic
    background: Background = field(default_factory=Background)
    last: int | None = None
    fault: str | None = None

    def save(self, step: int, take: Callable[[], Shards]) -> None:
        """Publish a state behind; waits for the save before this one. Collective.

        Args:
            take: called once the save before this one is over, whose memory it may take; what it returns nobody changes
                until the next save.
        """
        self.settle()
        directory, fault = self.ranks.main.broadcast(self._begin() if self.ranks.leads else None)
        write: Callable[[], None] | None = None
        if fault is None:
            state, fault = self._tried(take)
            if state is not None and fault is None:
                write, fault = self._tried(partial(begin_save, state, directory, self.ranks.save))
        if write is None or fault is not None:
            self._failed(step, directory, fault or "")
            return
        self.background.acquire(TIMEOUT.total_seconds())
        self.background.submit(partial(self._publish, step, directory, write))

    def _tried(self, job: Callable[[], _Value]) -> tuple[_Value | None, str | None]:
        """What it returned, and the first fault of all ranks. Collective."""
        value = fault = None
        try:
            value = job()
        except Exception as exc:  # noqa: BLE001 - the edge: every rank is told
            fault = _told(exc)
        return value, next((found for found in self.ranks.main.gather(fault) if found), None)

    def settle(self) -> None:
        """Wait until what was begun is published or given up."""
        self.background.join(TIMEOUT.total_seconds())

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Settle on the way out, whatever the way."""
        try:
            yield
        finally:
            self.settle()

    def finish(self) -> None:
        """Settle, and hold to account.

        Raises:
            SaveFailed: the last save did not come about.
        """
        self.settle()
        if self.fault is not None:
            raise SaveFailed(self.fault)

    def _begin(self) -> tuple[Path | None, str | None]:
        try:
            return self.store.begin(), None
        except OSError as exc:
            return None, _told(exc)

    def _publish(self, step: int, directory: Path, write: Callable[[], None]) -> None:
        began = self.clock()
        fault = _attempt(partial(self._write, step, write))
        faults = [f"rank {rank}: {found}" for rank, found in enumerate(self.ranks.save.gather(fault)) if found]
        if not faults and self.ranks.leads:
            faults = [found] if (found := _attempt(partial(self._name, step, directory))) else []
        faults = self.ranks.save.broadcast(faults)
        if faults:
            self._failed(step, directory, faults[0])
            return
        self.last, self.fault = step, None
        self._say("saved", step=step, path=str(self.store.path(step)), write_s=self.clock() - began)
        if self.ranks.leads and (gone := self.store.rotate()):
            self._say("rotated", steps=gone)

    def _write(self, step: int, write: Callable[[], None]) -> None:
        write()
        crash_point("in_save", step)

    def _name(self, step: int, directory: Path) -> None:
        end_save(directory)
        self.store.publish(directory, step)

    def _failed(self, step: int, directory: Path | None, fault: str) -> None:
        self.fault = fault
        if self.ranks.leads and directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        self._say("save_failed", step=step, detail=fault)

    def _say(self, event: str, **fields: object) -> None:
        if self.log is not None:
            self.log.write(event, **fields)


def _attempt(job: Callable[[], None]) -> str | None:
    try:
        job()
    except Exception as exc:  # noqa: BLE001 - the edge: every rank is told
        return _told(exc)
    return None


def _told(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"
