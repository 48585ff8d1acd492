"""The router against servers that are processes, with the signals that really happen to them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from router import Limits, Prober, Router, Upstream
from tests.support.upstreams import until

pytestmark = pytest.mark.anyio
_ROOT = Path(__file__).parents[2]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextmanager
def _server(*argv: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "tests.support.server_process", *argv]
    with subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.fixture
def servers() -> Iterator[tuple[subprocess.Popen[str], Upstream, Upstream]]:
    """One that holds whatever it gets, and one that answers."""
    with ExitStack() as stack:
        held, held_url = stack.enter_context(_server("hold"))
        _, url = stack.enter_context(_server())
        yield held, Upstream("held", held_url), Upstream("well", url)


Servers = tuple[subprocess.Popen[str], Upstream, Upstream]


async def test_kill_9_with_requests_in_flight_loses_none(servers: Servers) -> None:
    process, held, well = servers
    async with Router(Limits(server_concurrency=16)) as router:
        router.set_target("lane", [held, well])
        tasks = [asyncio.create_task(router.post("lane", "/generate", b"{}", timeout_s=60)) for _ in range(64)]
        await until(lambda: router.stats().totals.answered >= 40)
        assert router.stats().upstreams["held"].in_flight == 16
        process.kill()
        answers = await asyncio.gather(*tasks)
        assert {(answer.upstream, answer.status) for answer in answers} == {("well", 200)}
        assert not router.stats().upstreams["held"].healthy
        assert router.stats().targets["lane"].in_flight == 0


async def test_a_stopped_process_is_found_by_its_silence(servers: Servers) -> None:
    process, held, well = servers
    process.send_signal(signal.SIGSTOP)
    limits = Limits(server_concurrency=4, request_timeout_s=5.0, eject_after=2)
    async with Router(limits) as router, Prober(timeout_s=0.3) as prober:
        router.set_target("lane", [held, well])
        answers = await asyncio.gather(*(router.post("lane", "/generate", b"{}", timeout_s=60) for _ in range(8)))
        assert {answer.upstream for answer in answers} == {"well"}
        assert not router.stats().upstreams["held"].healthy
        assert not (await prober.probe(held)).alive
        process.send_signal(signal.SIGCONT)
        async with Prober(timeout_s=30) as patient:
            assert (await patient.probe(held)).alive
