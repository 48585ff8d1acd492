"""The in-process path: `Router.post`, as the lanes call it, beside a bare aiohttp session that parses the same answers.

`python -m benchmarks.in_process WHICH IN_FLIGHT SECONDS URL...` with WHICH `router` or `aiohttp`: prints one line.
Both run on the loop that the lanes have, asyncio's own.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable

import aiohttp

from router import Limits, Router, Upstream

_REQUEST = {"text": "y" * 900, "sampling_params": {"max_new_tokens": 16, "temperature": 0.0}}
Ask = Callable[[int], Awaitable[bytes]]


async def _with_router(in_flight: int, seconds: float, urls: list[str]) -> None:
    async with Router(Limits(server_concurrency=-(-in_flight // len(urls)))) as router:
        router.set_target("lane", [Upstream(url, url) for url in urls])

        async def ask(_: int) -> bytes:
            return (await router.post("lane", "/generate", _REQUEST, timeout_s=60)).body

        await _drive(ask, in_flight, seconds)


async def _with_aiohttp(in_flight: int, seconds: float, urls: list[str]) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(worker: int) -> bytes:
            async with session.post(f"{urls[worker % len(urls)]}/generate", json=_REQUEST) as response:
                return await response.read()

        await _drive(ask, in_flight, seconds)


async def _drive(ask: Ask, in_flight: int, seconds: float) -> None:
    done = 0
    over = False

    async def work(worker: int) -> None:
        nonlocal done
        while not over:
            assert json.loads(await ask(worker))["meta_info"]["completion_tokens"] == 16
            done += 1

    workers = [asyncio.create_task(work(worker)) for worker in range(in_flight)]
    await asyncio.sleep(seconds / 4)
    before, began, cpu = done, time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    requests, elapsed, spent = done - before, time.perf_counter() - began, time.process_time() - cpu
    over = True
    await asyncio.gather(*workers)
    print(json.dumps({"requests": requests, "seconds": elapsed, "cpu_s_per_1k": 1000 * spent / requests}), flush=True)


if __name__ == "__main__":
    _drivers = {"router": _with_router, "aiohttp": _with_aiohttp}
    asyncio.run(_drivers[sys.argv[1]](int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
