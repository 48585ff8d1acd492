"""Probes have connections of their own, and health is progress."""

from __future__ import annotations

import asyncio

import pytest

from router import Limits, Prober, Router
from tests.support.upstreams import running, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_probe_is_answered_while_the_pool_is_full() -> None:
    async with running("a", held=True) as a, Router(Limits(server_concurrency=8)) as router:
        router.set_target("lane", [a.fake.upstream])
        tasks = [asyncio.create_task(router.post("lane", "/generate", b"{}", timeout_s=30)) for _ in range(20)]
        await until(lambda: a.fake.in_flight == 8)
        async with Prober(timeout_s=10) as prober:
            assert (await prober.probe(a.fake.upstream)).alive
        a.fake.open.set()
        await asyncio.gather(*tasks)


async def test_a_busy_upstream_is_alive_and_a_stuck_one_is_not() -> None:
    done = {"a": 10}
    async with running("a") as a, Prober(timeout_s=0.1, progress=lambda id_: done[id_]) as prober:
        a.fake.health = None
        assert not (await prober.probe(a.fake.upstream)).alive  # what it did before the first probe proves nothing
        done["a"] += 3
        busy = await prober.probe(a.fake.upstream)
        assert (busy.alive, busy.detail) == (True, "busy: 3 requests done since the last probe")
        assert not (await prober.probe(a.fake.upstream)).alive


async def test_503_and_a_refused_connection_are_dead_whatever_was_done_before() -> None:
    done = iter(range(100))
    async with running("a") as a, Prober(timeout_s=10, progress=lambda _: next(done)) as prober:
        a.fake.health = 503
        assert await prober.probe(a.fake.upstream) is not None
        assert not (await prober.probe(a.fake.upstream)).alive
        await a.kill()
        gone = await prober.probe(a.fake.upstream)
        assert (gone.alive, "connect" in gone.detail) == (False, True)
