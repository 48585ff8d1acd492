"""A process that answers like an engine, as cheaply as Python can: `python -m benchmarks.wire_engine`.

Prints its port. POST: 1 KB of JSON after a delay, which GET /delay/MS sets. GET: what a router asks of a worker.
"""

from __future__ import annotations

import asyncio
import json
from typing import cast

import uvloop

_META = {"id": "0" * 32, "weight_version": "00000000.0", "finish_reason": {"type": "length"}, "completion_tokens": 16}
_TEXT = json.dumps({"text": "x" * 830, "meta_info": _META}).encode()
_ABOUT = json.dumps(
    {"model_path": "fake", "served_model_name": "fake", "is_generation": True, "status": "ready", "data": []}
).encode()


def _answer(body: bytes) -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 00:00:00 GMT\r\nserver: fake\r\n"
        b"content-length: %d\r\ncontent-type: application/json\r\n\r\n%b" % (len(body), body)
    )


class Engine(asyncio.Protocol):
    """One connection."""

    delay_s = 0.0

    def __init__(self) -> None:
        self._buffer = b""
        self._transport = cast(asyncio.Transport, None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody connects."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Answer each request once it is whole."""
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            self._buffer = self._buffer[end + 4 + length :]
            self._respond(head)

    def _respond(self, head: bytes) -> None:
        if head.startswith(b"get"):
            path = head.split(b" ", 2)[1]
            if path.startswith(b"/delay/"):
                Engine.delay_s = float(path[7:]) / 1000
            self._transport.write(_answer(_ABOUT))
        elif Engine.delay_s:
            asyncio.get_running_loop().call_later(Engine.delay_s, self._finish)
        else:
            self._transport.write(_GENERATED)

    def _finish(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(_GENERATED)


_GENERATED = _answer(_TEXT)


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve())
