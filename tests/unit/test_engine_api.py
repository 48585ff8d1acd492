"""Every foreign error of the engine's API is mapped, and no call waits for ever."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from eval_service.engine.errors import EngineDown, EngineError, EngineRefused, EngineTimeout
from eval_service.engine.grades import Keys
from eval_service.engine.sglang_api import SglangApi

Call = Callable[[SglangApi], Awaitable[Any]]
KEYS = Keys("api-key", "admin-key")


async def _against(reply: bytes | None, call: Call, *, hang: bool = False) -> tuple[Any, bytes]:
    """Make one call of a server that answers with these bytes (None: drops the connection); the result, the request."""
    seen = bytearray()
    hung = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend(await reader.readuntil(b"\r\n\r\n"))
        if hang:
            await hung.wait()
        if reply is not None:
            writer.write(reply)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, SglangApi(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", KEYS) as api:
        try:
            return await call(api), bytes(seen)
        finally:
            hung.set()


def _http(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


def _info(api: SglangApi) -> Awaitable[Any]:
    return api.model_info(timeout_s=60.0)


def _update(api: SglangApi) -> Awaitable[Any]:
    return api.update_weights_from_disk("/nowhere", "label", timeout_s=60.0)


@pytest.mark.parametrize(
    ("reply", "call", "error"),
    [
        (None, _info, EngineDown),
        (_http(b"{}", "503 Busy"), _info, EngineRefused),
        (_http(b"no json"), _info, EngineError),
        (_http(b"[]"), _info, EngineError),
        (_http(b'{"success": false, "message": "no"}'), _update, EngineRefused),
        (_http(b'{"meta_info": {}}'), lambda api: api.input_logprobs([1, 2]), EngineError),
    ],
)
def test_each_bad_answer_is_an_error_of_ours(reply: bytes | None, call: Call, error: type[EngineError]) -> None:
    with pytest.raises(EngineError) as caught:
        asyncio.run(_against(reply, call))
    assert type(caught.value) is error


def test_nobody_listening_is_down_and_no_answer_is_a_timeout() -> None:
    async def refused() -> None:
        with socket.socket() as bound:  # and not listening: nobody else can listen there meanwhile
            bound.bind(("127.0.0.1", 0))
            async with SglangApi(f"http://127.0.0.1:{bound.getsockname()[1]}", KEYS) as api:
                await api.model_info()

    with pytest.raises(EngineDown):
        asyncio.run(refused())
    with pytest.raises(EngineTimeout, match=r"/model_info: no answer within 0\.05 s"):
        asyncio.run(_against(None, lambda api: api.model_info(timeout_s=0.05), hang=True))


def test_only_calls_that_change_the_engine_carry_the_admin_key() -> None:
    _, info = asyncio.run(_against(_http(b"{}"), _info))
    _, update = asyncio.run(_against(_http(b'{"success": true}'), _update))
    assert b"Bearer api-key" in info
    assert b"Bearer admin-key" in update


@pytest.mark.parametrize("becomes_idle", [True, False])
def test_an_update_comes_once_the_scheduler_has_put_away_what_it_answered_last(becomes_idle: bool) -> None:
    """SGLang ends itself where it is to load before that; one that others keep busy is told to load all the same."""
    asked: list[str] = []
    idle = asyncio.Event()

    async def flush(request: web.Request) -> web.Response:
        assert float(request.query["timeout"]) > 0
        asked.append("flush")
        if not becomes_idle:
            return web.Response(text="Timed out waiting for idle state.", status=400)
        asyncio.get_running_loop().call_later(0.05, idle.set)
        await idle.wait()
        return web.Response(text="Cache flushed.")

    async def update(request: web.Request) -> web.Response:
        asked.append("idle" if idle.is_set() else "busy")
        return web.json_response({"success": True})

    async def body() -> None:
        app = web.Application()
        app.router.add_post("/flush_cache", flush)
        app.router.add_post("/update_weights_from_disk", update)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            async with SglangApi(f"http://127.0.0.1:{runner.addresses[0][1]}", KEYS) as api:
                await _update(api)
        finally:
            await runner.cleanup()

    asyncio.run(body())
    assert asked == ["flush", "idle" if becomes_idle else "busy"]
