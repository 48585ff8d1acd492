"""The gateway's HTTP server: health is its loop's progress, its port may be shared, and it ends in order."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest
from fastapi import FastAPI

from eval_service.contract.errors import Unavailable
from eval_service.serve.http_server import HttpServer

_WAIT_S = 30.0


class Application:
    """Requests that begin, and end when told to."""

    def __init__(self) -> None:
        self.begun, self.release = threading.Event(), threading.Event()

    def __call__(self) -> FastAPI:
        app = FastAPI()

        @app.get("/hang")
        async def hang() -> None:
            self.begun.set()
            self.release.wait(_WAIT_S)  # on the loop: this is the fault

        @app.get("/slow")
        async def slow() -> str:
            self.begun.set()
            await asyncio.to_thread(self.release.wait, _WAIT_S)
            return "done"

        return app


def test_health_does_not_answer_while_the_loop_that_serves_requests_hangs() -> None:
    app = Application()

    async def body() -> None:
        server = HttpServer(app, "127.0.0.1", 0, grace_s=1.0)
        await server.check()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=_WAIT_S) as client:
            asked = asyncio.ensure_future(client.get("/hang"))
            assert await asyncio.to_thread(app.begun.wait, _WAIT_S)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(server.check(), 0.2)
            app.release.set()
            await asked
        await server.check()
        await server.stop()
        with pytest.raises(Unavailable):
            await server.check()

    asyncio.run(body())


def test_what_is_under_way_ends_and_nothing_listens_after() -> None:
    app = Application()

    async def body() -> None:
        server = HttpServer(app, "127.0.0.1", 0, grace_s=_WAIT_S)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=_WAIT_S) as client:
            asked = asyncio.ensure_future(client.get("/slow"))
            assert await asyncio.to_thread(app.begun.wait, _WAIT_S)
            asyncio.get_running_loop().call_later(0.3, app.release.set)
            await server.stop()
            assert (await asked).json() == "done"
            with pytest.raises(httpx.ConnectError):
                await client.get("/slow")

    asyncio.run(body())


def test_a_successor_listens_before_the_one_before_it_has_ended() -> None:
    async def body() -> None:
        app = Application()
        app.release.set()
        first = HttpServer(app, "127.0.0.1", 0, grace_s=1.0)
        second = HttpServer(app, "127.0.0.1", first.port, grace_s=1.0)
        await first.stop()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{second.port}", timeout=_WAIT_S) as client:
            assert (await client.get("/slow")).json() == "done"
        await second.stop()

    asyncio.run(body())
