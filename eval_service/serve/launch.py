"""`evalfleet serve`: starts Ray (or joins a cluster) and the application, and stays until it is told to stop.

Ray's ports stand open on every interface behind a token alone, so token auth is always on: a cluster of our own gets a
fresh token in the state directory, and a joined one must have been given one.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType

from eval_service.contract.errors import ConfigError
from eval_service.fleet_config import FleetConfig, load_fleet
from eval_service.serve.settings import Settings, check

_OBJECT_STORE_BYTES = 100 << 20  # nothing of ours goes through it
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
    """
    fleet = _overridden(load_fleet(fleet_path), host, port)
    _authenticate(fleet, address)
    settings = Settings(fleet, suites_path.resolve())
    check(settings)
    # Only now: importing Ray takes seconds, and it reads its environment.
    import ray
    from ray import serve

    from eval_service.serve.application import APPLICATION, build

    stop = threading.Event()
    _stop_on_signals(stop)
    temp_dir = Path(tempfile.mkdtemp(prefix="evalfleet-")) if address is None else None
    try:
        _init_ray(address, temp_dir)
        settings = settings.with_grades(cuda=ray.cluster_resources().get("GPU", 0) > 0)
        options = {"host": fleet.service.host, "port": fleet.service.port}
        serve.start(proxy_location="HeadOnly", http_options=options)
        _stop_on_signals(stop)  # once more: Ray has put its own in their place
        serve.run(build(settings), name=APPLICATION, route_prefix="/")
        print(f"evalfleet: serving at http://{fleet.service.host}:{fleet.service.port}", flush=True)
        stop.wait()
        print("evalfleet: stopping", flush=True)
        serve.delete(APPLICATION)
        if address is None:
            serve.shutdown()
    finally:
        ray.shutdown()
        if temp_dir is not None:
            shutil.rmtree(temp_dir, ignore_errors=True)


def _overridden(fleet: FleetConfig, host: str | None, port: int | None) -> FleetConfig:
    update = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    service = fleet.service.model_copy(update=update)
    if service.port == 0:
        service = service.model_copy(update={"port": _free_port(service.host)})
    return fleet.model_copy(update={"service": service})


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _authenticate(fleet: FleetConfig, address: str | None) -> None:
    """Turn token auth on, for this process and everything that it starts.

    Raises:
        ConfigError: a cluster is to be joined, and there is no token.
    """
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if os.environ.get("RAY_AUTH_TOKEN"):
        return
    if address is not None:
        named = os.environ.get("RAY_AUTH_TOKEN_PATH")
        path = Path(named) if named else Path.home() / ".ray" / "auth_token"
        if not path.is_file():
            raise ConfigError(
                f"the cluster at {address} can be joined with its token only, and {path} is not there",
                field="address",
                hint="put the cluster's token into RAY_AUTH_TOKEN, or its file's path into RAY_AUTH_TOKEN_PATH",
            )
        return
    path = fleet.service.state_dir / _TOKEN_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)


def _init_ray(address: str | None, temp_dir: Path | None) -> None:
    import ray

    # A controller that hangs holds the lock; a graceful stop would only wait for it. Serve reads this where it runs.
    os.environ.setdefault("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")
    # Workers import this package as this process does, wherever it was started.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if address is not None:
        ray.init(address=address, namespace="evalfleet", log_to_driver=False)
        return
    ray.init(
        namespace="evalfleet",
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        _temp_dir=str(temp_dir),
        log_to_driver=False,
    )


def _stop_on_signals(stop: threading.Event) -> None:
    def on_signal(_signal: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
