"""A process that keeps requests in flight, each on a connection of its own, and tells how long they took.

`python -m benchmarks.wire_load IN_FLIGHT SECONDS URL...`: prints {requests, seconds, p50_ms, p99_ms, faults}. A quarter
of the time before is for warming up, and not counted.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

import uvloop

_BODY = json.dumps({"text": "y" * 900, "sampling_params": {"max_new_tokens": 16, "temperature": 0.0}}).encode()


class Client(asyncio.Protocol):
    """One connection: asks, waits for the whole answer, asks again."""

    took: list[float] = []  # noqa: RUF012 - of all clients
    faults = 0
    counting = False
    over = False

    def __init__(self, host: str, path: str) -> None:
        self._request = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\nUser-Agent: load\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(_BODY)}\r\n\r\n"
        ).encode() + _BODY
        self._transport = cast(asyncio.Transport, None)
        self._buffer = b""
        self._asked = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def data_received(self, data: bytes) -> None:
        """An answer, or a piece of one."""
        self._buffer = self._buffer + data if self._buffer else data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._buffer[:end].lower()
        at = head.find(b"content-length:")
        if at < 0:
            raise SystemExit("an answer without Content-Length is none that this load understands")
        if len(self._buffer) < end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0]):
            return
        if Client.counting:
            Client.took.append(perf_counter() - self._asked)
            Client.faults += not head.startswith(b"http/1.1 200")
        self._buffer = b""
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever hangs up is at fault."""
        Client.faults += not Client.over

    def _ask(self) -> None:
        self._asked = perf_counter()
        self._transport.write(self._request)


async def _drive(in_flight: int, seconds: float, urls: list[str]) -> None:
    loop = asyncio.get_running_loop()
    addresses = [urlsplit(url) for url in urls]
    for number in range(in_flight):
        at = addresses[number % len(urls)]
        await loop.create_connection(partial(Client, at.netloc, at.path), at.hostname or "", at.port or 80)
    await asyncio.sleep(seconds / 4)
    began, Client.counting = perf_counter(), True
    await asyncio.sleep(seconds)
    elapsed, Client.counting = perf_counter() - began, False
    Client.over = True
    took = sorted(Client.took) or [float("inf")]
    told = {
        "requests": len(Client.took),
        "seconds": elapsed,
        "p50_ms": 1000 * took[len(took) // 2],
        "p99_ms": 1000 * took[min(len(took) - 1, len(took) * 99 // 100)],
        "faults": Client.faults,
    }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    uvloop.run(_drive(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
