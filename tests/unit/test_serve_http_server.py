"""The gateway's HTTP server: health is its loop's progress, its port may be shared, and it ends in order."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx
import pytest
from fastapi import FastAPI

from eval_service.contract.errors import Unavailable
from eval_service.serve.http_server import HttpServer

_HANG_S = 1.0
_WAIT_S = 30.0


def application(hung: threading.Event | None = None) -> FastAPI:
    app = FastAPI()

    @app.get("/hang")
    async def hang() -> None:
        assert hung is not None
        hung.set()
        time.sleep(_HANG_S)  # noqa: ASYNC251 - this is the fault

    @app.get("/slow")
    async def slow() -> str:
        await asyncio.sleep(0.3)
        return "done"

    return app


def test_health_does_not_answer_while_the_loop_that_serves_requests_hangs() -> None:
    hung = threading.Event()

    async def body() -> None:
        server = HttpServer(lambda: application(hung), "127.0.0.1", 0, grace_s=1.0)
        await server.check()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=30.0) as client:
            asked = asyncio.ensure_future(client.get("/hang"))
            await asyncio.to_thread(hung.wait, _WAIT_S)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(server.check(), 0.2)
            await asked
        await server.check()
        await server.stop()
        with pytest.raises(Unavailable):
            await server.check()

    asyncio.run(body())


def test_what_is_under_way_ends_and_nothing_listens_after() -> None:
    async def body() -> None:
        server = HttpServer(application, "127.0.0.1", 0, grace_s=5.0)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=30.0) as client:
            asked = asyncio.ensure_future(client.get("/slow"))
            await asyncio.sleep(0.1)
            await server.stop()
            assert (await asked).json() == "done"
            with pytest.raises(httpx.ConnectError):
                await client.get("/slow")

    asyncio.run(body())


def test_a_successor_listens_before_the_one_before_it_has_ended() -> None:
    async def body() -> None:
        first = HttpServer(application, "127.0.0.1", 0, grace_s=1.0)
        second = HttpServer(application, "127.0.0.1", first.port, grace_s=1.0)
        await first.stop()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{second.port}", timeout=30.0) as client:
            assert (await client.get("/slow")).json() == "done"
        await second.stop()

    asyncio.run(body())
