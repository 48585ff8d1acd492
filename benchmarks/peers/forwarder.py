"""What most routers in Python are: a FastAPI catch-all route and one httpx.AsyncClient.

`python -m benchmarks.peers.forwarder PORT CONNECTIONS URL...`
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response

_NOT_PASSED = {"host", "content-length", "connection", "keep-alive", "transfer-encoding", "date", "server"}


def build(urls: list[str], max_connections: int) -> FastAPI:
    """The application; the engine with the fewest requests in flight is chosen."""
    in_flight = dict.fromkeys(urls, 0)
    limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
    client = httpx.AsyncClient(limits=limits, timeout=None)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await client.aclose()

    app = FastAPI(lifespan=lifespan)

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def forward(path: str, request: Request) -> Response:
        engine = min(in_flight, key=in_flight.__getitem__)
        in_flight[engine] += 1
        try:
            headers = {name: value for name, value in request.headers.items() if name not in _NOT_PASSED}
            body = await request.body()
            answer = await client.request(request.method, f"{engine}/{path}", content=body, headers=headers)
        finally:
            in_flight[engine] -= 1
        passed = {name: value for name, value in answer.headers.items() if name not in _NOT_PASSED}
        return Response(answer.content, answer.status_code, passed)

    return app


if __name__ == "__main__":
    uvicorn.run(
        build(sys.argv[3:], int(sys.argv[2])), host="127.0.0.1", port=int(sys.argv[1]), log_level="error", backlog=2048
    )
