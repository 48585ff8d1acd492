"""`evalfleet serve`: starts Ray (or joins a cluster) and the application, and stays until it is told to stop.

Ray's ports stand open on every interface behind a token alone, so token auth is always on. A cluster of our own gets a
fresh token in a directory of its own: the workers that Ray starts later read it anew, so no second service may replace
it. A joined one must have been given one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from eval_service.contract.errors import ConfigError
from eval_service.fleet_config import FleetConfig, load_fleet
from eval_service.ports import free_port
from eval_service.scratch import Kind, Scratch, collect
from eval_service.serve.ending import Ending, ray_died
from eval_service.serve.settings import Settings, check
from eval_service.waking import Wake

_OBJECT_STORE_BYTES = 100 << 20  # nothing of ours goes through it
_PORT_S = 15.0
_PORT_LOOK_S = 0.2
_TOKEN_FILE = "ray-token"


def serve_forever(
    fleet_path: Path,
    suites_path: Path,
    *,
    address: str | None = None,
    host: str | None = None,
    port: int | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: what can't work is refused before Ray is started.
        Unavailable: Ray has died, and the application with it.
    """
    fleet = overridden(load_fleet(fleet_path), host, port)
    if address is not None:
        _need_token(address)
    settings = Settings.of(fleet, suites_path.resolve(), os.environ)
    check(settings)
    if address is None:
        _check_port(fleet.service.host, fleet.service.port, "service.port")
        if settings.proxy is not None:
            _check_port(settings.proxy.host, settings.proxy.port, "service.proxy_port")
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Only now: importing Ray takes seconds, and it reads its environment.
    import ray
    from ray import serve

    from eval_service.serve.application import APPLICATION, build

    stop = threading.Event()
    _stop_on_signals(stop)
    collect()
    scratch = Scratch.make(Kind.RAY) if address is None else None
    temp_dir = scratch.path if scratch is not None else None
    ending = Ending(stop, scratch, stop_s=fleet.service.stop_s)
    ending.begin()
    try:
        if temp_dir is not None:
            _make_token(temp_dir)
        _init_ray(address, temp_dir, ending)
        settings = settings.with_grades(cuda=ray.cluster_resources().get("GPU", 0) > 0)
        settings = replace(settings, joined=address is not None)
        serve.start(proxy_location="Disabled")  # the gateway has a port of its own
        _stop_on_signals(stop)  # once more: Ray has put its own in their place
        _deploy(serve, build(settings), APPLICATION)
        print(f"evalfleet: serving at http://{fleet.service.host}:{fleet.service.port}", flush=True)
        if (proxy := settings.proxy) is not None:
            print(f"evalfleet: lanes at http://{proxy.host}:{proxy.port}/lanes/{{point}}", flush=True)
        _stay(stop, ending.ray_lives if address is None else lambda: any(node["Alive"] for node in ray.nodes()))
        print("evalfleet: stopping", flush=True)
        serve.delete(APPLICATION)
        if address is None:
            serve.shutdown()
    finally:
        ending.leave()
        ray.shutdown()
        ending.close()


def _deploy(serve: Any, application: Any, name: str) -> None:
    """Run the application; one that doesn't come up is taken away, or it would be left on a cluster that goes on."""
    try:
        serve.run(application, name=name, route_prefix=None)
    except BaseException:
        with contextlib.suppress(Exception):
            serve.delete(name)
        raise


def _stay(stop: threading.Event, lives: Callable[[], bool], *, look_s: float = 5.0) -> None:
    """Wait to be told to stop; without Ray there is nothing to stay for, and whoever watches this process restarts it.

    Raises:
        Unavailable: no node of the cluster is alive.
    """
    while not stop.wait(look_s):
        if not lives():
            raise ray_died()


def overridden(fleet: FleetConfig, host: str | None = None, port: int | None = None) -> FleetConfig:
    """With what the command was told instead, and a free port for 0."""
    update = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    service = fleet.service.model_copy(update=update)
    if service.port == 0:
        service = service.model_copy(update={"port": free_port(service.host)})
    if service.proxy_port == 0:
        service = service.model_copy(update={"proxy_port": free_port(service.proxy_host or service.host)})
    return fleet.model_copy(update={"service": service})


def _check_port(host: str, port: int, key: str, *, patience_s: float = _PORT_S) -> None:
    """Refuse a port that another service has: the gateway's replicas share it with one another, and so would they.

    Args:
        patience_s: a service that was killed leaves its port to its gateway for a few seconds more.

    Raises:
        ConfigError: with the port.
    """
    until = time.monotonic() + patience_s
    while True:
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                return
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE or time.monotonic() >= until:
                hint = "is another service running? else set another port"
                raise ConfigError(f"{host}:{port} can't be had: {exc.strerror}", field=key, hint=hint) from exc
        time.sleep(_PORT_LOOK_S)


def _need_token(address: str) -> None:
    """See that a cluster that is to be joined can be, before Ray takes 20 s to find out that it can't.

    Raises:
        ConfigError: there is no token.
    """
    if os.environ.get("RAY_AUTH_TOKEN"):
        return
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    if not path.is_file():
        raise ConfigError(
            f"the cluster at {address} can be joined with its token only, and {path} is not there",
            field="address",
            hint="put the cluster's token into RAY_AUTH_TOKEN, or its file's path into RAY_AUTH_TOKEN_PATH",
        )


def _make_token(directory: Path) -> None:
    """A token for a cluster of our own, unless one was given; whatever this process starts finds it."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = directory / _TOKEN_FILE
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)


def _init_ray(address: str | None, temp_dir: Path | None, ending: Ending) -> None:
    import ray

    # A controller that hangs holds the lock; a graceful stop would only wait for it. Serve reads this where it runs.
    os.environ.setdefault("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")
    # Ray asks a process to end 5 s before it kills it; one that hangs keeps its successor waiting for all of them.
    os.environ.setdefault("RAY_kill_worker_timeout_milliseconds", "500")
    # Who decides and who answers is not background work: on a busy host it would be taken for hung. Engines are, see
    # `EngineDeployment`.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Each replica and each handle would wake up ten times a second to count up metrics of Serve, idle or not.
    os.environ.setdefault("RAY_SERVE_METRICS_EXPORT_INTERVAL_MS", "2000")
    # A thread for each call that may hang: each would leave what it freed in one of glibc's many arenas, 2 MB a minute.
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    # Workers import this package as this process does, wherever it was started.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if address is not None:
        ray.init(address=address, namespace="evalfleet", log_to_driver=False)
        ending.joined(ray.get_runtime_context().gcs_address)
        return
    ray.init(
        namespace="evalfleet",
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        _temp_dir=str(temp_dir),
        log_to_driver=False,
    )
    ending.own(ray.get_runtime_context().gcs_address)


def _stop_on_signals(stop: threading.Event) -> None:
    """Set it, from another thread: the one that a signal interrupts may hold the event's own lock."""
    wake = Wake()

    def on_signal(_signal: int, _frame: FrameType | None) -> None:
        wake.ring()

    def pass_on() -> None:
        wake.wait()
        stop.set()

    threading.Thread(target=pass_on, name="signals", daemon=True).start()
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
