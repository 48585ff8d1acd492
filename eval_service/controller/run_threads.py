"""Work on shared storage, which may hang for ever: each run has its own few threads, and its own wait.

Invariants: a call that hangs holds up later calls for its own run and nothing else; every call has a deadline; no more
than `at_once` calls that get on are at work at the same time, and one that is slow no longer counts.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from eval_service.controller.db import DaemonThreads, NotBegun

SLOW_S = 2.0  # a call that takes longer may hang: others do not wait for its end
_T = TypeVar("_T")


class StorageHangs(TimeoutError):
    """A run's storage has not answered what it was asked before, so it is asked nothing more now."""


class RunThreads:
    """Threads for one kind of work.

    Args:
        share: calls for one run at the same time, those that hang included.
        at_once: calls for all runs at the same time, those that take long apart.
    """

    def __init__(self, name: str, *, share: int = 1, at_once: int = 16) -> None:
        self._share = share
        self._threads = DaemonThreads(name)
        self._turns = asyncio.Semaphore(at_once)
        self._busy: Counter[str] = Counter()
        self._lock = threading.Lock()

    def free(self, run: str) -> bool:
        """Whether a call for this run may begin now."""
        return self._busy[run] < self._share

    async def run(self, run: str, call: Callable[[], _T], *, timeout_s: float) -> _T:
        """Run a call and return what it returns.

        Raises:
            StorageHangs: the run's share is taken by calls that have no answer yet.
            TimeoutError: no answer by then; the call goes on unheard, and holds its place among the run's.
            NotBegun: no thread could be started for it.
        """
        if not self.free(run):
            raise StorageHangs("its storage has not answered what it was asked before")
        self._count(run, 1)
        began = False
        try:
            async with asyncio.timeout(timeout_s):
                await self._turns.acquire()
                with self._turn():
                    began = True
                    return await self._threads.run(self._counted(run, call))
        except NotBegun:
            began = False
            raise
        except TimeoutError as exc:
            raise TimeoutError(str(exc) or f"its storage did not answer within {timeout_s:g} s") from exc
        finally:
            if not began:
                self._count(run, -1)

    def _counted(self, run: str, call: Callable[[], _T]) -> Callable[[], _T]:
        def work() -> _T:
            try:
                return call()
            finally:
                self._count(run, -1)

        return work

    def _count(self, run: str, change: int) -> None:
        with self._lock:
            self._busy[run] += change

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Give a turn that was taken back when its call is over, or slow."""
        taken = True

        def give_back() -> None:
            nonlocal taken
            if taken:
                taken = False
                self._turns.release()

        slow = asyncio.get_running_loop().call_later(SLOW_S, give_back)
        try:
            yield
        finally:
            slow.cancel()
            give_back()
