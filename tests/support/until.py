"""Waiting on an event loop for what raises no event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(look: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Return once it is so."""
    async with asyncio.timeout(timeout_s):
        while not look():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
