"""Many callers wait for one price: a gateway looks once for all of them, and an idle controller locks nobody out."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from eval_service.contract.errors import Unavailable
from eval_service.contract.wire import DrainRequest
from eval_service.gateway.services import SharedLook
from tests.support.ledger import Ledger


@dataclass
class Things:
    """What is over after so many looks."""

    over_at: dict[str, int] = field(default_factory=dict)
    looks: int = 0

    def __call__(self, asked: Collection[str]) -> Collection[str]:
        self.looks += 1
        return {thing for thing in asked if self.over_at.get(thing, 10**6) <= self.looks}


def test_fifty_waiters_cost_one_look_at_a_time() -> None:
    things = Things({"a": 1, "b": 3})

    async def wait() -> None:
        look = SharedLook(things)
        await asyncio.gather(*(look.wait("ab"[number % 2], 20.0) for number in range(50)))

    asyncio.run(wait())
    assert things.looks == 3


def test_a_wait_ends_with_its_own_time_and_leaves_the_others_waiting() -> None:
    things = Things({"late": 4})

    async def wait() -> list[bool]:
        look = SharedLook(things)
        patient = asyncio.create_task(look.wait("late", 20.0))
        await look.wait("never", 0.01)
        early = patient.done()
        await patient
        await look.wait("late", 20.0)  # the look began anew
        return [early, patient.done()]

    assert asyncio.run(wait()) == [False, True]


def test_a_ledger_that_fails_is_told_to_everybody_who_waits() -> None:
    def over(_asked: Collection[str]) -> Collection[str]:
        raise Unavailable("the disk is gone")

    async def wait() -> list[BaseException | None]:
        look = SharedLook(over)
        return await asyncio.gather(*(look.wait(thing, 20.0) for thing in "abc"), return_exceptions=True)

    assert [type(found) for found in asyncio.run(wait())] == [Unavailable] * 3


def test_one_look_tells_which_drains_are_over_and_which_never_were(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.put_run("r2")
    ledger.queued(1)
    begun = [ledger.intents.begin_drain(DrainRequest(run=run, timeout_s=60.0)) for run in ("r1", "r2", "r1")]
    assert ledger.views.drains_over([*begun, "unknown"]) == {begun[1], "unknown"}
    ledger.clock.turn(61.0)
    assert ledger.views.drains_over(begun) == set(begun)


def test_a_controller_that_finds_nothing_to_do_takes_no_write_lock(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.reserve(1)
    ledger.intents.begin_drain(DrainRequest(run="r1", timeout_s=60.0))
    with ledger.db.writing():
        assert ledger.look() == 0


@pytest.mark.parametrize("index", ["points_by_run_state", "snapshots_on_storage"])
def test_a_ledger_of_before_gets_the_indexes_that_it_lacks(tmp_path: Path, index: str) -> None:
    ledger = Ledger(tmp_path)
    query = f"SELECT count(*) FROM sqlite_master WHERE name = '{index}'"
    with ledger.db.writing() as connection:
        connection.exec_driver_sql(f"DROP INDEX {index}")
    again = type(ledger.db)(ledger.db.url, clock=ledger.clock)
    with again.reading() as connection:
        assert connection.exec_driver_sql(query).scalar_one() == 1
    again.close()
