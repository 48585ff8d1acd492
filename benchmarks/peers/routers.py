"""The routers that are measured: each started in front of the same engines, with the address to send requests to.

All may have as many requests in flight as the largest load brings. A peer that is not installed yields None.
"""

from __future__ import annotations

import importlib.util
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import process, telling_process
from eval_service.demo.service import free_port

_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A router that runs: where requests go, and its process."""

    url: str
    pid: int


@contextmanager
def ours(urls: Sequence[str], in_flight: int, scratch: Path) -> Iterator[Peer]:
    """`python -m router.proxy`."""
    config = scratch / "proxy.toml"
    each = -(-in_flight // len(urls))
    config.write_text(f"port = 0\nlimits = {{server_concurrency = {each}}}\n[targets.lane]\nurls = {list(urls)}\n")
    with telling_process("router.proxy", "--config", str(config)) as (started, line):
        yield Peer(f"http://{line.split()[-1]}/lanes/lane/generate", started.pid)


@contextmanager
def forwarder(urls: Sequence[str], in_flight: int, scratch: Path) -> Iterator[Peer]:
    """FastAPI and httpx, with as many connections as there may be requests."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.peers.forwarder", str(port), str(in_flight), *urls]
    with _listening(command, port, scratch / "forwarder.log") as peer:
        yield peer


@contextmanager
def nginx(urls: Sequence[str], in_flight: int, scratch: Path) -> Iterator[Peer | None]:
    """nginx, least connections, as many workers as cores."""
    program = shutil.which("nginx")
    if program is None:
        yield None
        return
    port = free_port()
    servers = "".join(f"server {url.removeprefix('http://')};" for url in urls)
    (scratch / "nginx.conf").write_text(
        f"daemon off; worker_processes auto; pid {scratch}/nginx.pid; error_log {scratch}/nginx.log;\n"
        "events { worker_connections 4096; }\n"
        f"http {{ access_log off; client_body_temp_path {scratch}/body; proxy_temp_path {scratch}/proxy;\n"
        f"fastcgi_temp_path {scratch}/f; uwsgi_temp_path {scratch}/u; scgi_temp_path {scratch}/s;\n"
        f"keepalive_requests 100000000; upstream engines {{ least_conn; {servers} keepalive {in_flight};\n"
        "keepalive_requests 100000000; }\n"
        f"server {{ listen 127.0.0.1:{port} backlog=2048; location / {{ proxy_pass http://engines;\n"
        'proxy_http_version 1.1; proxy_set_header Connection ""; }} }} }}\n'.replace("}}", "}")
    )
    command = [program, "-p", str(scratch), "-c", str(scratch / "nginx.conf")]
    with _listening(command, port, scratch / "nginx.out") as peer:
        yield peer


@contextmanager
def sglang_router(
    urls: Sequence[str], in_flight: int, scratch: Path, python: str = sys.executable
) -> Iterator[Peer | None]:
    """sglang-router (Rust), round robin, as `python` has it."""
    if python == sys.executable and importlib.util.find_spec("sglang_router") is None:
        yield None
        return
    port, metrics = free_port(), free_port()
    command = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *urls, "--policy", "round_robin", "--prometheus-port", str(metrics)]
    command += ["--max-concurrent-requests", str(4 * in_flight), "--log-level", "error"]
    with _listening(command, port, scratch / "sglang-router.log") as peer:
        yield peer


@contextmanager
def given(path: str, urls: Sequence[str], scratch: Path) -> Iterator[Peer]:
    """A program of the user's: called with a port and the engines' URLs, it forwards until it is ended."""
    port = free_port()
    with _listening([path, str(port), *urls], port, scratch / "peer.log") as peer:
        yield peer


@contextmanager
def _listening(command: Sequence[str], port: int, log: Path) -> Iterator[Peer]:
    with log.open("w") as out, process(command, stdout=out, stderr=out) as started:
        deadline = time.monotonic() + _START_S
        while not _accepts(port):
            if started.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} does not listen: {log.read_text()[-500:]}")
            time.sleep(0.1)
        yield Peer(f"http://127.0.0.1:{port}/generate", started.pid)


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
