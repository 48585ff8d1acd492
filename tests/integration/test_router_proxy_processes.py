"""The proxy as a process, in front of engines that are processes, with the signals that really happen to them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.processes import assert_gone, tree

pytestmark = pytest.mark.anyio
_ROOT = Path(__file__).parents[2]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextmanager
def _started(*argv: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", *argv]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=_ROOT, stdin=pipe, stdout=pipe, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def engines() -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """One that holds whatever it gets, and one that answers."""
    with ExitStack() as stack:
        held = stack.enter_context(_started("tests.support.server_process", "hold"))
        well = stack.enter_context(_started("tests.support.server_process"))
        yield held, _line(held), _line(well)


Engines = tuple[subprocess.Popen[str], str, str]


async def test_kill_9_of_an_engine_loses_no_request_and_sigterm_ends_the_proxy_in_order(
    engines: Engines, tmp_path: Path
) -> None:
    process, held, well = engines
    config = tmp_path / "proxy.toml"
    config.write_text(f'port = 0\n[targets.lane]\nurls = ["{held}", "{well}"]\n')
    with _started("router.proxy", "--config", str(config)) as proxy:
        url = f"http://{_line(proxy).split()[-1]}/lanes/lane/generate"
        async with httpx.AsyncClient(timeout=60) as client:
            tasks = [asyncio.create_task(client.post(url, json={})) for _ in range(20)]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            process.kill()
            answers = await asyncio.gather(*tasks)
            assert {(answer.status_code, answer.headers["x-router-upstream"]) for answer in answers} == {(200, well)}
            proxy.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(proxy.wait, 30) == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "targets"),
        ("[targets.lane]\nurls = []", "targets.lane.urls"),
        ('[targets.lane]\nurls = ["x"]', "url: 'x'"),
        ('prot = 1\n[targets.lane]\nurls = ["http://x"]', "prot"),
        ('[targets.lane]\nurls = ["http://x"]\n[limits]\nmax_wait = 1', "max_wait"),
        ('[targets.lane]\nurls = ["http://x"]\n[clients]\nhold_bytes = 0', "hold_bytes"),
        ("[targets", "no TOML"),
    ],
)
def test_a_config_that_cannot_work_is_refused_and_names_the_key(text: str, told: str, tmp_path: Path) -> None:
    config = tmp_path / "proxy.toml"
    config.write_text(text)
    command = [sys.executable, "-m", "router.proxy", "--config", str(config)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, told in done.stderr) == (2, True)


@pytest.mark.real
async def test_under_serve_it_has_a_port_of_its_own_and_follows_the_controllers_table(engines: Engines) -> None:
    _, _, well = engines
    with tempfile.TemporaryDirectory(prefix="ev-") as temp:
        env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64, "RAY_USAGE_STATS_ENABLED": "0"}
        env["PYTHONPATH"] = str(_ROOT)
        with _started("tests.support.proxy_application", temp, well, env=env) as application:
            word, port = (await asyncio.to_thread(_line, application)).split()
            assert word == "serving"
            family = tree(application.pid)
            assert application.stdin is not None
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                got = await client.post("/lanes/lane/generate", json={})
                assert (got.status_code, got.headers["x-router-upstream"]) == (200, "engine")
                application.stdin.write("turn\n")
                application.stdin.flush()
                assert await asyncio.to_thread(_line, application) == "applied 2"
                assert (await client.get("/healthz")).json()["targets"] == 1
                assert (await client.post("/lanes/none/generate", json={})).status_code == 404
            application.stdin.close()
            assert await asyncio.to_thread(application.wait, 60) == 0
        assert_gone([process for process in family if isinstance(process, psutil.Process)])
