"""A scorer of one's own: a function of (output, answer), with keyword arguments out of the suite. It may be async."""

from __future__ import annotations

import asyncio


async def brevity(output: str, answer: str, *, most: int) -> float:
    """1 if the output is no longer than `most` characters, less the longer it is; a real one might ask a server."""
    await asyncio.sleep(0)
    return min(1.0, most / max(1, len(output)))
