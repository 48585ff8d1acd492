"""Blocking work off the event loop: the ledger's in one thread, so that a controller's writes keep their order; a file
system's in threads of their own, which may hang for ever without holding up anything, not even the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from eval_service.contract.errors import Unavailable

log = logging.getLogger(__name__)
_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_P = ParamSpec("_P")
_T = TypeVar("_T")


class LedgerThread:
    """Runs the ledger's blocking calls, one after another."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")

    async def __call__(self, call: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run one call in the thread and return what it returns."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: call(*args, **kwargs))

    async def patiently(self, call: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a call again until the ledger can be used: what has to be written must not be lost to a moment.

        Whoever waits bounds it, by cancelling. The call must be one that may be repeated.
        """
        backoff_s = _BACKOFF_S
        while True:
            try:
                return await self(call, *args, **kwargs)
            except Unavailable as exc:
                log.warning("%s; it is tried again", exc)
            await asyncio.sleep(backoff_s)
            backoff_s = min(_MAX_BACKOFF_S, backoff_s * 2)

    def close(self) -> None:
        """Let what was begun end."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class NotBegun(OSError):
    """The host would not have one more thread: the call was not made, and may be later."""


class DaemonThreads:
    """A thread a call: there is no pool that calls which hang could fill."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def run(self, call: Callable[[], _T]) -> _T:
        """Run one call and return what it returns; it goes on, unheard, when the caller is cancelled.

        Raises:
            NotBegun: no thread could be started.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()

        def settle(outcome: Callable[[], _T]) -> None:
            if future.done():
                return
            try:
                future.set_result(outcome())
            except Exception as exc:  # noqa: BLE001 - of the call: it is raised where it is waited for
                future.set_exception(exc)

        def work() -> None:
            outcome = _outcome(call)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any longer
                loop.call_soon_threadsafe(settle, outcome)

        try:
            threading.Thread(target=work, name=self._name, daemon=True).start()
        except RuntimeError as exc:
            raise NotBegun(f"{self._name}: {exc}") from exc
        return await future


def _outcome(call: Callable[[], _T]) -> Callable[[], _T]:
    """Run a call; what comes back gives its result, or raises what it raised."""
    try:
        result = call()
    except Exception as exc:  # noqa: BLE001 - a thread's edge: handed to whoever waits
        error = exc

        def raises() -> _T:
            raise error

        return raises
    return lambda: result
