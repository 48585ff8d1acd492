"""The first GPU engine on a host starts alone, the others after it and side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eval_service.engine import server as servers
from eval_service.engine.errors import BootFailed
from eval_service.engine.first import StartLock
from eval_service.engine.pin import SystemClock
from eval_service.engine.server import BootOptions, boot_server
from eval_service.fleet_config import GroupConfig


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


class Boots:
    """Stands in for the boot of a GPU engine: each waits to be let up."""

    def __init__(self) -> None:
        self.begun: list[Any] = []

    async def boot(self, grade: Any, group: Any, options: Any, clock: Any) -> Any:
        up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begun.append(up)
        await up
        return Stood()


class Stood:
    """What a boot returns: it holds the lock until it is stopped."""

    start_lock: StartLock | None = None


@pytest.fixture
def boots(monkeypatch: pytest.MonkeyPatch) -> Boots:
    boots = Boots()
    monkeypatch.setattr(servers, "_boot", boots.boot)
    monkeypatch.setattr(servers, "cuda_available", lambda: True)
    return boots


@pytest.fixture
def locks(tmp_path: Path) -> Iterator[list[StartLock]]:
    held = [StartLock(tmp_path / "lock") for _ in range(3)]
    yield held
    for lock in held:
        lock.close()


def test_the_first_is_alone_until_it_is_up_and_then_the_others_start_beside_each_other(
    tmp_path: Path, boots: Boots
) -> None:
    async def scenario() -> None:
        group = GroupConfig.model_validate({"model": "/m"})
        options = BootOptions(log=tmp_path / "log", start_lock=tmp_path / "lock")
        starts = [asyncio.create_task(boot_server(group, options, SystemClock())) for _ in range(3)]
        await until(lambda: len(boots.begun) == 1)
        await asyncio.sleep(0.6)  # the others have looked twice
        assert len(boots.begun) == 1
        boots.begun[0].set_result(None)
        await until(lambda: len(boots.begun) == 3)
        for up in boots.begun[1:]:
            up.set_result(None)
        for server in await asyncio.gather(*starts):
            assert server.start_lock is not None
            server.start_lock.close()

    asyncio.run(scenario())


def test_where_the_first_does_not_come_up_the_next_one_is_the_first(tmp_path: Path, boots: Boots) -> None:
    async def scenario() -> None:
        group = GroupConfig.model_validate({"model": "/m"})
        options = BootOptions(log=tmp_path / "log", start_lock=tmp_path / "lock")
        starts = [asyncio.create_task(boot_server(group, options, SystemClock())) for _ in range(2)]
        await until(lambda: len(boots.begun) == 1)
        boots.begun[0].set_exception(BootFailed("no memory"))
        await until(lambda: len(boots.begun) == 2)
        boots.begun[1].set_result(None)
        first, second = await asyncio.gather(*starts, return_exceptions=True)
        failed = [end for end in (first, second) if isinstance(end, BootFailed)]
        assert len(failed) == 1
        for server in (first, second):
            if isinstance(server, Stood) and server.start_lock is not None:
                server.start_lock.close()

    asyncio.run(scenario())


def test_one_that_dies_leaves_nothing_behind_and_an_engine_waits_no_longer_than_it_may_start(
    locks: list[StartLock], tmp_path: Path
) -> None:
    async def scenario() -> None:
        clock = Clock()
        assert await locks[0].turn(clock, 10.0)
        assert not await locks[1].turn(clock, 10.0)  # it has waited, and starts nevertheless
        assert clock.now >= 10.0
        locks[0].close()  # as the kernel does for a process that has died
        assert await locks[2].turn(clock, 0.5)
        assert not await StartLock(tmp_path / "no such" / "lock").turn(clock, 0.5)

    asyncio.run(scenario())


async def until(holds: Any) -> None:
    """Look until it holds."""
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - what it looks at is not ours to signal
            await asyncio.sleep(0.01)
