"""Those who follow the service's events, in a process of their own: `python -m benchmarks.followers URL [RUN ...]`.

`-` in place of a run follows all of them. It prints a line when all are connected, reads until its standard input ends,
and prints how many events each was told, as a JSON list. Apart from the callers, whose times would else be those of
reading all this.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

ALL = "-"
_CONNECT_S = 30.0


@dataclass(slots=True)
class Following:
    """Somebody who follows the events, all of them or those of one run."""

    run: str
    seen: int = 0  # events
    connected: asyncio.Event = field(default_factory=asyncio.Event)

    async def follow(self, session: aiohttp.ClientSession) -> None:
        """Read until it is cancelled."""
        query = {} if self.run == ALL else {"run": self.run}
        async with session.get("/events", params=query) as response:
            response.raise_for_status()
            self.connected.set()
            async for line in response.content:
                self.seen += line.startswith(b"event: point")


async def follow_all(url: str, runs: Sequence[str]) -> list[int]:
    """Follow until the standard input ends; returns how many events each was told."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        following = [Following(run) for run in runs]
        tasks = [asyncio.create_task(one.follow(session)) for one in following]
        try:
            async with asyncio.timeout(_CONNECT_S):
                await asyncio.gather(*(one.connected.wait() for one in following))
            print("connected", flush=True)
            await asyncio.to_thread(sys.stdin.read)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return [one.seen for one in following]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(follow_all(sys.argv[1], sys.argv[2:]))), flush=True)
