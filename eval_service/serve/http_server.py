"""The gateway's own HTTP server, on an event loop of its own in the replica's process.

Serve starts, health-checks and replaces the gateway; its HTTP proxy is not used: a request that does nothing took it
5 ms, and 37 ms where 16 came at a time, against 0.3 and 5 ms here, and it buffers a stream for a reader that doesn't
read. Several replicas of one node share the port: the kernel hands each its share of the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import uvicorn
import uvloop
from starlette.types import ASGIApp

from eval_service.contract.errors import Unavailable
from eval_service.serve.bounded_protocol import HEAD_S, bounded
from eval_service.serve.loop_thread import LoopThread

_START_S = 10.0
_KEEP_ALIVE_S = 90  # longer than any client of ours keeps an idle connection
_BACKLOG = 2048


class HttpServer:
    """Listens from its construction until `stop`.

    Raises:
        OSError: the address can't be had.
    """

    def __init__(
        self, app: Callable[[], ASGIApp], host: str, port: int, *, grace_s: float, head_s: float = HEAD_S
    ) -> None:
        self._socket = _listen(host, port)
        self._grace_s = grace_s
        self._thread = LoopThread("http", uvloop.new_event_loop())
        config = uvicorn.Config(
            app,
            factory=True,
            http=bounded(head_s),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(grace_s)),
        )
        self._server = uvicorn.Server(config)
        self._running = asyncio.run_coroutine_threadsafe(self._server.serve([self._socket]), self._thread.loop)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._socket.getsockname()[1])

    async def check(self) -> None:
        """Return once its loop has turned.

        Raises:
            Unavailable: it has ended.
        """
        if self._running.done():
            raise Unavailable("the HTTP server has ended") from self._running.exception()
        await self._thread.call(asyncio.sleep(0))

    async def stop(self) -> None:
        """Take no more, let what is under way end within the grace, and close the socket."""
        self._server.should_exit = True
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._grace_s + _START_S):
                await asyncio.wrap_future(self._running)
        self._thread.close(self._grace_s)
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind((host, port))
        found.listen(_BACKLOG)
    except OSError:
        found.close()
        raise
    return found
