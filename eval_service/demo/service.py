"""Starts the service as a child, and waits until it and its engines can work."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

import psutil

from eval_service import ports
from eval_service.contract.client import EvalClient
from eval_service.contract.errors import EvalfleetError, Unavailable
from eval_service.contract.wire import EngineState, EngineView, FleetView
from eval_service.demo.processes import Child, DemoError, Family
from eval_service.demo.workspace import Workspace
from eval_service.fleet_config import EVAL_GROUP

HOST = "127.0.0.1"
LOOK_S = 0.5


def free_port() -> int:
    """A port of this host that nobody listens on now."""
    return ports.free_port(HOST)


def start_service(family: Family, workspace: Workspace, port: int) -> Child:
    """Start `evalfleet serve`."""
    files = ["--fleet", str(workspace.config("fleet")), "--suites", str(workspace.config("suites"))]
    return family.start(
        "the service",
        ["eval_service.cli.main", "serve", *files, "--host", HOST, "--port", str(port)],
        log=workspace.log("service"),
        cwd=workspace.out,
    )


def wait_ready(child: Child, client: EvalClient, *, timeout_s: float) -> None:
    """Wait until the ledger can be written and a controller acts."""

    def ready() -> bool:
        with suppress(Unavailable):
            return client.ready().ok
        return False

    _wait(child, ready, timeout_s, "the service is not ready")


def wait_engines(
    child: Child, client: EvalClient, count: int, *, timeout_s: float, told: Callable[[int], None]
) -> None:
    """Wait until `/fleet` shows so many ready engines; `told` hears how many there are."""

    def enough() -> bool:
        ready = [engine for engine in engines(client) if engine.state is EngineState.READY]
        told(len(ready))
        return len(ready) >= count

    _wait(child, enough, timeout_s, f"{count} engines are not ready")


def fleet(client: EvalClient) -> FleetView | None:
    """The fleet as last seen; None while the service can't say."""
    with suppress(EvalfleetError):
        return client.fleet()
    return None


def engines(client: EvalClient) -> list[EngineView]:
    """The eval group's engines as last seen; none while the service can't say."""
    return engines_of(fleet(client))


def engines_of(view: FleetView | None) -> list[EngineView]:
    """The eval group's engines in a view, if there is one."""
    return [engine for group in view.groups if group.name == EVAL_GROUP for engine in group.engines] if view else []


def port_of(url: str) -> int | None:
    """The port in a URL."""
    return urlsplit(url).port


def listens(port: int) -> bool:
    """Whether anybody accepts connections on a local port."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0


def listeners(port: int) -> list[psutil.Process]:
    """Who listens on a local port, as far as that can be seen."""
    with suppress(psutil.Error):
        found = [
            conn.pid for conn in psutil.net_connections("tcp") if conn.status == "LISTEN" and conn.laddr[1] == port
        ]
        return [psutil.Process(pid) for pid in found if pid is not None]
    return []


def _wait(child: Child, done: Callable[[], bool], timeout_s: float, complaint: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        child.must_run()
        if time.monotonic() > deadline:
            raise DemoError(f"{complaint} after {timeout_s:.0f} s; {child.log} ends:\n{child.tail()}")
        child.wait(LOOK_S)
