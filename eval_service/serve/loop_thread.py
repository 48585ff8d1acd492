"""An event loop on a thread of its own: the controller's lanes never share a loop with Serve's calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class LoopThread:
    """Starts at once; `close` ends it."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine there and wait for it here."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def soon(self, call: Callable[[], None]) -> None:
        """Run a plain call there; nobody waits for it."""
        self.loop.call_soon_threadsafe(call)

    def close(self, timeout_s: float) -> None:
        """Cancel what runs there, and end the thread."""
        self.soon(self._cancel_all)
        self._thread.join(timeout_s)

    def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        asyncio.gather(*tasks, return_exceptions=True).add_done_callback(lambda _: self.loop.stop())

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()
