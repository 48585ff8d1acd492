"""The ledger off the event loop: one thread, so that a controller's writes keep their order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

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

    def close(self) -> None:
        """Let what was begun end."""
        self._pool.shutdown(wait=False, cancel_futures=True)
