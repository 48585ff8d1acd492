"""A fake engine that is a server in the test's own process: it boots in milliseconds, and dies when told to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from eval_service.engine import fake
from eval_service.engine.errors import BootFailed
from eval_service.engine.grades import Keys, read_model_facts
from eval_service.engine.pin import Clock, EngineFacts, Pinner
from eval_service.engine.server import BootOptions, Server, boot_digest
from eval_service.engine.sglang_api import SglangApi
from eval_service.fleet_config import GroupConfig


class Exited(Exception):
    """The fake ended itself."""


class _Os:
    """What the fake has of `os`: to end its process is to end this server."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _exit(self, code: int) -> None:
        raise Exited(str(code))


def _open() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(frozen=True, slots=True)
class Gates:
    """What a test holds up of an engine, over all its boots: its answers to samples, not to pins, and its updates."""

    answers: asyncio.Event = field(default_factory=_open)
    updates: asyncio.Event = field(default_factory=_open)

    async def pass_by(self, request: web.Request) -> None:
        """Return once the request may be worked on."""
        if request.path == "/generate" and not (await request.json()).get("return_logprob"):
            await self.answers.wait()
        elif request.path == "/update_weights_from_disk":
            await self.updates.wait()

    def open(self) -> None:
        """Hold up nothing more."""
        self.answers.set()
        self.updates.set()


class InnerProcess:
    """Stands where a ServerProcess does."""

    def __init__(self, runner: web.AppRunner, engine: fake.FakeEngine) -> None:
        self.engine = engine
        self.exited = asyncio.Event()
        self.exit_code: int | None = None
        self.server_pid: int | None = None
        self.supervisor_pid: int | None = None
        self._runner = runner
        self._cleaning: asyncio.Task[None] | None = None

    def ready(self) -> None:
        """There is no supervisor to tell."""

    def kill(self) -> None:
        """Drop every connection and answer nothing more."""
        if self._cleaning is None:
            self._cleaning = asyncio.get_running_loop().create_task(self._clean())

    async def stop(self) -> None:
        """End it and wait for that."""
        self.kill()
        await self.exited.wait()
        await self._drop_connections()  # one may have been accepted in the moment that the socket was closed

    async def _drop_connections(self) -> None:
        server = self._runner.server
        for _ in range(5):
            for connection in list(server.connections) if server else ():
                if connection.transport is not None:
                    connection.transport.abort()
            await asyncio.sleep(0)

    async def _clean(self) -> None:
        loop = asyncio.get_running_loop()
        for site in list(self._runner.sites):
            listening: asyncio.Server = getattr(site, "_server")  # noqa: B009 - aiohttp has no way to ask for it
            for sock in listening.sockets:
                loop.remove_reader(sock.fileno())  # what asyncio has accepted when a server closes it would leak
            await self._drop_connections()
            await site.stop()
        await self._drop_connections()
        self.exit_code = -9
        self.exited.set()


async def boot_inner(group: GroupConfig, options: BootOptions, clock: Clock, *, gates: Gates | None = None) -> Server:
    """What `boot_server` does, without a process."""
    setattr(fake, "os", _Os())  # noqa: B010 - a module is no place for mypy to know
    keys = Keys.fresh()
    assert group.model is not None
    boot = {"model": str(group.model), "knobs": group.overrides, "api_key": keys.api, "admin_api_key": keys.admin}
    engine = fake.FakeEngine(boot)
    if engine.knobs.boot_fails:
        raise BootFailed("a knob says that the boot fails")
    await clock.sleep(engine.knobs.boot_s)
    app = engine.app()
    holder: list[InnerProcess] = []

    @web.middleware
    async def dies(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            if gates is not None:
                await gates.pass_by(request)
            return await handler(request)
        except Exited:
            holder[0].kill()
            raise

    app.middlewares.insert(0, dies)
    async with contextlib.AsyncExitStack() as stack:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await runner.setup()
        process = InnerProcess(runner, engine)
        stack.push_async_callback(process.stop)
        holder.append(process)
        await web.TCPSite(runner, options.host, 0).start()
        url = f"http://{options.host}:{runner.addresses[0][1]}"
        api = await stack.enter_async_context(SglangApi(url, keys))
        model = read_model_facts(group.model, group, {})
        pinner = Pinner(api, EngineFacts(model.vocab_size, model.dtype, checksums=False), clock)
        await pinner.note_boot(boot_digest(group.model), timeout_s=10.0)
        stack.pop_all()
    return Server(uuid.uuid4().hex, url, keys, process, api, pinner, model)
