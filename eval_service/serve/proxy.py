"""The proxy as a deployment of the application, with a socket and port of its own: Serve's carries the API only.

The controller is asked by Serve handle, never the other way round: the call is a long poll that tells what the proxy
has applied and brings the table of the lanes that it drives. A lane is in that table, or the controller's own lanes
drive it, never both. An engine that left the table may be pinned anew once `applied` has reached the table that says
so, or the controller has not been asked for `lease_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc

import uvloop
from ray.serve.handle import DeploymentHandle

from eval_service.serve.loop_thread import LoopThread
from router.proxy import GC_THRESHOLDS, ProxyRunner, ProxySettings, Table, TableReport

_START_S = 10.0


class ServeSource:
    """The controller, by Serve handle; its method `poll_proxy(report)` answers with the table."""

    def __init__(self, controller: DeploymentHandle, loop: asyncio.AbstractEventLoop) -> None:
        self._controller = controller
        self._loop = loop  # the replica's own, which handles belong to

    async def poll(self, report: TableReport) -> Table:
        """See `router.proxy.Source`."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._ask(report), self._loop))

    async def _ask(self, report: TableReport) -> Table:
        table: Table = await self._controller.poll_proxy.remote(report)
        return table


class ProxyDeployment:
    """Holds the proxy on an event loop of its own, so that Serve's calls never wait for a lane's traffic."""

    def __init__(self, settings: ProxySettings, controller: DeploymentHandle) -> None:
        gc.set_threshold(*GC_THRESHOLDS)
        self._grace_s = settings.grace_s
        self._thread = LoopThread("proxy", uvloop.new_event_loop())
        self._proxy = ProxyRunner(settings, ServeSource(controller, asyncio.get_running_loop()))
        asyncio.run_coroutine_threadsafe(self._proxy.start(), self._thread.loop).result(_START_S)

    async def port(self) -> int:
        """The port it listens on."""
        return self._proxy.port

    async def check_health(self) -> None:
        """Raises when the proxy has ended; a loop that doesn't turn never answers, which Serve takes for the same."""
        await self._thread.call(self._check())

    async def __del__(self) -> None:
        with contextlib.suppress(Exception):
            await self._thread.call(self._proxy.stop())
        self._thread.close(self._grace_s)

    async def _check(self) -> None:
        self._proxy.check()
