"""The Serve application `evalfleet`: gateway, controller, and one deployment a group of engines.

Serve places, health-checks, restarts and scales; what they do is in modules that know nothing of Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.handle import DeploymentHandle

from eval_service.contract.errors import Unavailable
from eval_service.controller.acting import Parts
from eval_service.controller.core import Controller
from eval_service.engine.addresses import engine_address
from eval_service.engine.attached import Attachment
from eval_service.engine.protocol import Command, EngineReport
from eval_service.engine.runner import EngineRunner
from eval_service.engine.server import BootOptions
from eval_service.engine.start_guard import StartGuard
from eval_service.fleet_config import GroupConfig
from eval_service.ledger.bounds import Bounds
from eval_service.ledger.database import Database
from eval_service.ledger.lock import lock_of
from eval_service.objects.places import Places
from eval_service.serve.loop_thread import LoopThread
from eval_service.serve.proxy import ProxyDeployment
from eval_service.serve.scaling import DesiredCount
from eval_service.serve.settings import Settings
from eval_service.serve.trackers import TrackersDeployment
from eval_service.suites.suite import functions_of, load_suites
from router.proxy import Table, TableReport

APPLICATION = "evalfleet"
HEAD_NODE_RESOURCE = "node:__internal_head__"  # Ray's own
# Serve's default of 5 would let a few long polls starve everything else.
MAX_ONGOING = 1000
_POLL_TIMEOUT_S = 10.0
WAKE_EVERY_S = 0.05  # a call over Serve costs as much as the dispatch that it tells of
_STOP_S = 5.0
ENGINE_NICENESS = 15  # Ray's own for what it starts
_HTTP_GRACE_S = 2.0
# Three checks in a row must fail. All wait for the controller, so that one is given up sooner than the others. An
# engine's replica is lost to the controller after `engine_lost_s` anyway; on a busy host its loop may be late, and
# ending it would cost a start of SGLang.
_CHECK_TIMEOUT_S = 2.0
_CONTROLLER_CHECK_TIMEOUT_S = 1.2
_ENGINE_CHECK_TIMEOUT_S = 10.0
_ENGINE_STOP_S = 10.0  # beside what it may take to hand its samples over


class GatewayDeployment:
    """The FastAPI application over the ledger, on a port of its own."""

    def __init__(self, settings: Settings, controller: DeploymentHandle, others: list[DeploymentHandle]) -> None:
        del others  # named so that Serve deploys them with the application
        # Only here: no other replica needs FastAPI and uvicorn, and a new controller is waited for.
        from eval_service.gateway.app import build_app
        from eval_service.gateway.services import Services
        from eval_service.serve.http_server import HttpServer

        self._controller = controller
        settings.make_home()
        database = Database(settings.ledger)
        service = settings.fleet.service
        suites = load_suites(settings.suites)
        bounds = Bounds.of(settings.fleet, suites.keys(), functions_of(suites))
        self._loop = asyncio.get_running_loop()
        self._wakes, self._woke_at = False, self._loop.time()
        groups, address, access = settings.fleet.groups, settings.proxy_address, settings.access
        self._services = services = Services(
            database, bounds, version("evalfleet"), self._wake, groups, address, access
        )
        self._http = HttpServer(lambda: build_app(services), service.host, service.port, grace_s=_HTTP_GRACE_S)

    async def check_health(self) -> None:
        """Raises when the requests' loop has ended or the ledger can't be read; does not answer when either hangs."""
        await self._http.check()
        await asyncio.to_thread(self._services.check)

    async def __del__(self) -> None:
        await self._http.stop()
        self._services.close()

    def _wake(self) -> None:
        """Best effort: the controller also looks by itself. From any thread."""
        self._loop.call_soon_threadsafe(self._wake_soon)

    def _wake_soon(self) -> None:
        """Of many that come at once, one call tells of all."""
        if not self._wakes:
            self._wakes = True
            self._loop.call_at(self._woke_at + WAKE_EVERY_S, self._wake_now)

    def _wake_now(self) -> None:
        self._wakes, self._woke_at = False, self._loop.time()
        self._controller.wake.remote()


class ControllerDeployment:
    """Holds a controller on a loop of its own."""

    def __init__(self, settings: Settings) -> None:
        self._thread = LoopThread("controller")
        settings.make_home()
        database = Database(settings.ledger)
        node = ray.util.get_node_ip_address() if settings.joined else None
        suites, lock = load_suites(settings.suites), lock_of(settings.ledger)
        parts = Parts(settings.fleet, suites, database, lock, node, settings.lane_key)
        self._controller = Controller(parts)
        self._running = asyncio.run_coroutine_threadsafe(self._controller.run(), self._thread.loop)

    async def poll(self, report: EngineReport) -> Command | None:
        """An engine's replica reports; see `ControllerLink`."""
        return await self._thread.call(self._controller.poll(report))

    async def poll_proxy(self, report: TableReport) -> Table:
        """The proxy reports, and is told which lanes it drives; see `router.proxy.Source`."""
        return await self._thread.call(self._controller.poll_proxy(report))

    async def wake(self) -> None:
        """There is something to do."""
        self._thread.soon(self._controller.wake)

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises, or does not answer."""
        if self._running.done() and (error := self._running.exception()) is not None:
            raise error
        if not self._controller.healthy():
            raise Unavailable("the controller makes no progress, or another one acts")

    def __del__(self) -> None:
        self._thread.soon(self._controller.stop)
        with contextlib.suppress(Exception):
            self._running.result(_STOP_S)
        self._thread.close(_STOP_S)


class ServeLink:
    """A replica's way to the controller, by Serve handle."""

    def __init__(self, controller: DeploymentHandle) -> None:
        self._controller = controller

    async def poll(self, report: EngineReport) -> Command | None:
        """See `ControllerLink`."""
        async with asyncio.timeout(_POLL_TIMEOUT_S):
            answer: Command | None = await self._controller.poll.remote(report)
        return answer


class EngineDeployment:
    """One engine: a runner that owns an SGLang process group."""

    def __init__(self, settings: Settings, group: str, controller: DeploymentHandle) -> None:
        self._guard = StartGuard()
        if os.nice(0) < ENGINE_NICENESS:  # on the host that the trainer runs on, it and the controller go first
            os.nice(ENGINE_NICENESS - os.nice(0))
        tag = serve.get_replica_context().replica_id.unique_id
        state_dir = settings.fleet.service.state_dir
        (state_dir / "logs").mkdir(parents=True, exist_ok=True)  # this node's own
        self._handover_s = settings.fleet.service.handover_s
        node = ray.util.get_node_ip_address()
        self._runner = EngineRunner(
            f"{group}-{tag}",
            group,
            settings.fleet.groups[group],
            node=node,
            options=BootOptions(
                host=engine_address(settings.fleet.service.engine_host, node, joined=settings.joined),
                log=state_dir / "logs" / f"engine-{group}-{tag}.log",
                fleet_overrides=settings.fleet.overrides,
                start_lock=state_dir / "engines.lock",
            ),
            link=ServeLink(controller),
            places=Places(settings.fleet.objects, state_dir),
        )
        self._running = asyncio.get_running_loop().create_task(self._runner.run())

    async def check_health(self) -> None:
        """Raises when this replica can't keep an engine."""
        self._guard.disarm()  # from here on Serve looks after it
        await self._runner.check_health()

    async def __del__(self) -> None:
        await self._runner.hand_over(self._handover_s)
        await self._runner.stop()


class AttachedDeployment:
    """Engines that are somebody else's: one runner for each URL, all in one replica."""

    def __init__(self, settings: Settings, group: str, controller: DeploymentHandle) -> None:
        tag = serve.get_replica_context().replica_id.unique_id
        config = settings.fleet.groups[group]
        self._handover_s = settings.fleet.service.handover_s
        places = Places(settings.fleet.objects, settings.fleet.service.state_dir)
        self._runners = [
            EngineRunner(
                f"{group}-{tag}-{number}",
                group,
                config,
                node=urlsplit(url).hostname or url,
                options=BootOptions(log=Path(os.devnull)),
                link=ServeLink(controller),
                boot=Attachment(url),
                places=places,
            )
            for number, url in enumerate(config.urls)
        ]
        loop = asyncio.get_running_loop()
        self._running = [loop.create_task(runner.run()) for runner in self._runners]

    async def check_health(self) -> None:
        """Raises when one of them can't be attached as configured."""
        for runner in self._runners:
            await runner.check_health()

    async def __del__(self) -> None:
        await asyncio.gather(*(runner.hand_over(self._handover_s) for runner in self._runners))
        await asyncio.gather(*(runner.stop() for runner in self._runners))


class PlaceholderDeployment:
    """Holds the GPUs that Serve gives it, and starts nothing."""


def build(settings: Settings) -> Any:
    """Bind the deployments into one application; the gateway stands for it."""
    # A hung controller holds the lock until Serve kills it; what an orderly one leaves undone, the next one takes up.
    grace_s = settings.fleet.service.controller_grace_s
    controller = _deployment(ControllerDeployment, "controller", graceful_shutdown_timeout_s=grace_s)
    controller = controller.options(health_check_timeout_s=_CONTROLLER_CHECK_TIMEOUT_S, ray_actor_options=_on_head())
    controller = controller.bind(settings)
    groups = [
        found
        for name, group in settings.fleet.groups.items()
        if (found := _group(settings, name, group, controller)) is not None
    ]
    gateway = _deployment(GatewayDeployment, "gateway", graceful_shutdown_timeout_s=_HTTP_GRACE_S + 2.0)
    # Its port is that of the address which the service is known by, so it goes where that leads to.
    others = [*groups, *_proxy(settings, controller), *_trackers(settings)]
    return gateway.options(ray_actor_options=_on_head()).bind(settings, controller, others)


def _on_head() -> dict[str, Any]:
    return {"num_cpus": 0, "resources": {HEAD_NODE_RESOURCE: 0.001}}


def _proxy(settings: Settings, controller: Any) -> list[Any]:
    """The proxy, on the head node, where the API is: both are reached under one name."""
    if (proxy := settings.proxy) is None:
        return []
    part = _deployment(ProxyDeployment, "proxy", graceful_shutdown_timeout_s=proxy.grace_s + 5.0)
    return [part.options(ray_actor_options=_on_head()).bind(proxy, controller)]


def _trackers(settings: Settings) -> list[Any]:
    """Who tells trackers, webhooks and traces, on the head node, where the ledger is."""
    fleet = settings.fleet
    if not (fleet.trackers or fleet.webhooks or fleet.traces):
        return []
    part = _deployment(TrackersDeployment, "trackers", graceful_shutdown_timeout_s=_ENGINE_STOP_S)
    return [part.options(ray_actor_options=_on_head()).bind(fleet, settings.ledger)]


def _group(settings: Settings, name: str, group: GroupConfig, controller: Any) -> Any | None:
    """A group's deployment; None where it can have no engines."""
    least, most = group.bounds
    if group.kind == "attached":
        part = _deployment(AttachedDeployment, f"engines-{name}", graceful_shutdown_timeout_s=20.0)
        return part.options(ray_actor_options=_on_head()).bind(settings, name, controller)
    if most == 0:
        return None
    gpus = group.num_gpus_per_engine
    if group.kind == "placeholder":
        name = f"placeholder-{name}"
        part = _deployment(PlaceholderDeployment, name, replicas=least, gpus=gpus, graceful_shutdown_timeout_s=2.0)
        return part.bind()
    gpus = gpus if group.grade == "sglang" else 0
    grace_s = settings.fleet.service.handover_s + _ENGINE_STOP_S
    part = _deployment(
        EngineDeployment, f"engines-{name}", replicas="auto", gpus=gpus, graceful_shutdown_timeout_s=grace_s
    )
    part = part.options(
        health_check_timeout_s=_ENGINE_CHECK_TIMEOUT_S,
        autoscaling_config=_scaled(settings, name),
        ray_actor_options={"num_cpus": 0, "num_gpus": gpus, "resources": group.node_resources},
    )
    return part.bind(settings, name, controller)


def _scaled(settings: Settings, name: str) -> AutoscalingConfig:
    """Within the group's bounds, by what the controller decides, and without a wait of Serve's own."""
    least, most = settings.fleet.groups[name].bounds
    return AutoscalingConfig(
        min_replicas=least,
        initial_replicas=least,
        max_replicas=most,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        policy=AutoscalingPolicy(
            policy_function=DesiredCount, policy_kwargs={"ledger": settings.told_ledger, "group": name}
        ),
    )


def _deployment(
    part: type, name: str, *, replicas: int | str = 1, gpus: int = 0, graceful_shutdown_timeout_s: float
) -> Any:
    return serve.deployment(part).options(
        name=name,
        num_replicas=replicas,
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": 0, "num_gpus": gpus},
        logging_config={"enable_access_log": False},  # a line for each poll of each engine
        health_check_period_s=1.0,
        health_check_timeout_s=_CHECK_TIMEOUT_S,
    )
