"""Many callers wait for one price: a gateway looks once for all of them, and an idle controller locks nobody out."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from eval_service.contract.errors import Unavailable
from eval_service.contract.wire import DrainRequest
from eval_service.gateway import waiting
from eval_service.gateway.waiting import SharedLook, Watch
from tests.support.ledger import Ledger
from tests.support.until import until


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
        look = SharedLook(things, Watch(itertools.count().__next__))
        await asyncio.gather(*(look.wait("ab"[number % 2], 20.0) for number in range(50)))

    asyncio.run(wait())
    assert things.looks == 3


def test_a_wait_ends_with_its_own_time_and_leaves_the_others_waiting() -> None:
    things = Things({"late": 4})

    async def wait() -> list[bool]:
        look = SharedLook(things, Watch(itertools.count().__next__))
        patient = asyncio.create_task(look.wait("late", 20.0))
        await look.wait("never", 0.01)
        early = patient.done()
        await patient
        await look.wait("late", 20.0)  # the look began anew
        return [early, patient.done()]

    assert asyncio.run(wait()) == [False, True]


def test_waiting_costs_no_look_while_the_ledger_does_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty drains that wait for hours ask for one number, and look when it has changed."""
    monkeypatch.setattr(waiting, "AGAIN_S", 60.0)  # what only time changes is not this test's
    things, number = Things(), [0]
    watched: list[int] = []

    def changes() -> int:
        watched.append(number[0])
        return number[0]

    async def wait() -> None:
        look = SharedLook(things, Watch(changes))
        callers = [asyncio.create_task(look.wait("a", 20.0)) for _ in range(50)]
        await until(lambda: len(watched) > 3)
        assert things.looks <= 2, "the first, and one more for those who came meanwhile"
        things.over_at["a"] = things.looks + 1
        number[0] += 1
        await asyncio.gather(*callers)

    asyncio.run(wait())


def test_a_change_between_a_look_and_the_wait_for_the_next_is_not_missed() -> None:
    numbers = itertools.count()

    async def wait() -> None:
        watch = Watch(numbers.__next__)
        turn = watch.turn
        await watch.beyond(turn, 20.0)
        async with asyncio.timeout(20.0):
            await watch.beyond(turn, 100.0)  # it has changed since, so there is nothing to wait for

    asyncio.run(wait())


def test_callers_that_wait_for_room_look_together(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for run in ("full", "open", "going"):
        ledger.put_run(run, max_in_flight=1)
    point = ledger.reserve(1, "full").points[0].id
    ledger.reserve(1, "going")
    ledger.orders.delete_run("going")
    asked = ("full", "open", "going", "unheard")
    assert ledger.views.with_room(asked) == {"open", "going", "unheard"}
    ledger.orders.cancel(point)
    ledger.look()
    assert ledger.views.with_room(asked) == set(asked)


def test_a_ledger_that_fails_is_told_to_everybody_who_waits() -> None:
    def over(_asked: Collection[str]) -> Collection[str]:
        raise Unavailable("the disk is gone")

    async def wait() -> list[BaseException | None]:
        look = SharedLook(over, Watch(itertools.count().__next__))
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
