"""The proxy's deployment under Serve, beside a controller that only tells its table: prints a line, ends with stdin.

`python -m tests.support.proxy_application TEMP_DIR URL`: the table has one lane, with one engine at that URL. Each line
read from stdin takes the engine away or puts it back, and the answer is the report in which that was applied.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from eval_service.serve.proxy import ProxyDeployment
from router import Upstream
from router.proxy import ProxySettings, Table, TableReport, Target


class Controller:
    """Owns a table; polls return at once if it is new, else after a moment."""

    def __init__(self, url: str) -> None:
        self._targets = (Target((Upstream("engine", url, {"Authorization": "Bearer engine"}),)), Target())
        self._version = 1
        self._applied = 0

    async def poll_proxy(self, report: TableReport) -> Table:
        self._applied = report.applied
        if report.known == self._version:
            await asyncio.sleep(0.05)
        return Table(self._version, {"lane": self._targets[1 - self._version % 2]})

    async def turn(self) -> int:
        """The other table; returns once it is applied."""
        self._version += 1
        return await self.applied()

    async def applied(self) -> int:
        """The table's number, once the proxy has it."""
        while self._applied < self._version:  # noqa: ASYNC110 - told from another actor
            await asyncio.sleep(0.02)
        return self._applied


class Ingress:
    """Serve wants one that is asked from outside."""

    def __init__(self, proxy: DeploymentHandle, controller: DeploymentHandle) -> None:
        self.proxy = proxy
        self.controller = controller

    async def port(self) -> int:
        port: int = await self.proxy.port.remote()
        return port

    async def turn(self) -> int:
        applied: int = await self.controller.turn.remote()
        return applied

    async def applied(self) -> int:
        applied: int = await self.controller.applied.remote()
        return applied


def _deployment(part: type) -> Any:
    return serve.deployment(part).options(max_ongoing_requests=100, ray_actor_options={"num_cpus": 0})


def main() -> None:
    """Serve until stdin ends."""
    ray.init(
        include_dashboard=False, object_store_memory=100 << 20, _temp_dir=sys.argv[1], log_to_driver=False, num_cpus=2
    )
    serve.start(proxy_location="Disabled")
    controller = _deployment(Controller).bind(sys.argv[2])
    proxy = _deployment(ProxyDeployment).bind(ProxySettings(port=0, lease_s=60.0), controller)
    handle = serve.run(_deployment(Ingress).bind(proxy, controller), name="proxied", route_prefix=None)
    handle.applied.remote().result(timeout_s=60)
    print("serving", handle.port.remote().result(timeout_s=60), flush=True)
    for _ in sys.stdin:
        print("applied", handle.turn.remote().result(timeout_s=60), flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
