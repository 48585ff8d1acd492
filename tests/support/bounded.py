"""Bodies of tests that are coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

Body = Callable[[], Awaitable[None]]


def go(body: Body, *, timeout_s: float = 90) -> None:
    """Run a test's body under a deadline."""

    async def bounded() -> None:
        async with asyncio.timeout(timeout_s):
            await body()

    asyncio.run(bounded())
