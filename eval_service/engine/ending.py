"""Parts of a pin, none of which waits for a server that has ended meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from eval_service.engine.pin import PinFailed
from eval_service.engine.protocol import PinError
from eval_service.engine.server import Process

_T = TypeVar("_T")


async def unless_it_ends(process: Process, work: Coroutine[Any, Any, _T], *, timeout_s: float | None = None) -> _T:
    """What the work returns or raises, if it does so before the server's end and the deadline; else it is cancelled.

    Raises:
        PinFailed: the server ended first, or the time is up.
    """
    part = asyncio.create_task(work)
    exited = asyncio.create_task(process.exited.wait())
    try:
        await asyncio.wait((part, exited), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if part.done():
            return part.result()
        if exited.done():
            raise PinFailed(PinError.DIED, f"the server ended with {process.exit_code}")
        raise PinFailed(PinError.TIMEOUT, f"not pinned within {timeout_s:g} s")
    finally:
        for task in (part, exited):
            task.cancel()
