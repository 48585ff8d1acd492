"""The gate: sized by the fleet, resized while requests wait, first come first served, nothing dropped or leaked."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router import Limits, NoUpstream, Router, Upstream, WaitTimeout
from router.gate import Gate
from router.upstream import Run, Slots
from tests.support.upstreams import running, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_64_in_flight_are_reached_and_never_exceeded() -> None:
    async with running("a", held=True) as a, running("b", held=True) as b:
        async with Router(Limits(server_concurrency=32)) as router:
            router.set_target("lane", [a.fake.upstream, b.fake.upstream])
            tasks = [asyncio.create_task(router.post("lane", "/generate", b"{}", timeout_s=30)) for _ in range(200)]
            await until(lambda: a.fake.in_flight + b.fake.in_flight == 64)
            assert router.stats().targets["lane"].waiting == 136
            a.fake.open.set()
            b.fake.open.set()
            await asyncio.gather(*tasks)
            assert (a.fake.peak, b.fake.peak, router.stats().targets["lane"].peak) == (32, 32, 64)


async def test_the_gate_grows_and_shrinks_under_those_who_wait() -> None:
    async with running("a", held=True) as a, running("b", held=True) as b:
        async with Router(Limits(server_concurrency=4)) as router:
            router.set_target("lane", [a.fake.upstream])
            tasks = [asyncio.create_task(router.post("lane", "/generate", b"{}", timeout_s=30)) for _ in range(20)]
            await until(lambda: a.fake.in_flight == 4)
            router.add("lane", b.fake.upstream)
            await until(lambda: b.fake.in_flight == 4)
            assert (router.stats().targets["lane"].capacity, router.stats().targets["lane"].waiting) == (8, 12)
            router.remove("lane", "a")
            assert router.stats().targets["lane"].capacity == 4
            a.fake.open.set()
            await until(lambda: a.fake.in_flight == 0)
            b.fake.open.set()
            answers = await asyncio.gather(*tasks)
            assert [answer.status for answer in answers] == [200] * 20
            assert (a.fake.seen, b.fake.peak) == (4, 4)


async def test_no_upstream_at_all_waits_and_goes_on_when_one_joins() -> None:
    async with running("a") as a, Router() as router:
        router.set_target("lane", [])
        tasks = [asyncio.create_task(router.post("lane", "/generate", b"{}", timeout_s=30)) for _ in range(5)]
        await until(lambda: router.stats().targets["lane"].waiting == 5)
        assert router.stats().targets["lane"].capacity == 0
        router.add("lane", a.fake.upstream)
        assert [answer.upstream for answer in await asyncio.gather(*tasks)] == ["a"] * 5


async def test_an_upstream_shared_by_two_targets_is_bounded_over_both() -> None:
    async with running("a", held=True) as a, Router(Limits(server_concurrency=2)) as router:
        for name in ("one", "two"):
            router.set_target(name, [a.fake.upstream])
        tasks = [
            asyncio.create_task(router.post(name, "/generate", b"{}", timeout_s=30)) for name in ("one", "two") * 3
        ]
        await until(lambda: a.fake.in_flight == 2)
        a.fake.open.set()
        await asyncio.gather(*tasks)
        assert a.fake.peak == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("server_concurrency", 0), ("max_faults", 0), ("eject_after", 0), ("max_waiting", -1), ("wait_timeout_s", 0)],
)
def test_limits_that_would_hang_or_refuse_everything_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"^{name}: {value}"):
        Limits(**{name: value})


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://host", "http://", ""])
def test_a_url_that_is_none_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValueError, match=r"^url: "):
        Upstream("a", url)


def _gate(limits: Limits, ids: str) -> Gate:
    gate: Gate
    sequence = count(1)

    def freed(run: Run) -> None:
        slots[run.upstream.id].runs.discard(run)
        gate.pump()

    gate = Gate("lane", limits, freed, lambda: next(sequence))
    slots = {id_: Slots(Upstream(id_, "http://host")) for id_ in ids}
    gate.slots.update(slots)
    return gate


async def test_waiters_go_in_in_the_order_of_their_coming_and_replays_first() -> None:
    gate = _gate(Limits(server_concurrency=1), "ab")
    held = [await gate.admit(30) for _ in range(2)]
    order: list[str] = []

    async def come(name: str, excluded: frozenset[str] = frozenset(), replay: bool = False) -> None:
        run = await gate.admit(30, excluded, replay=replay)
        order.append(name)
        gate.release(run)

    tasks = [asyncio.create_task(come(name)) for name in ("first", "second")]
    await until(lambda: gate.waiting == 2)
    tasks.append(asyncio.create_task(come("replay", frozenset({held[0].upstream.id}), replay=True)))
    await until(lambda: gate.waiting == 3)
    gate.release(held[1])
    await asyncio.gather(*tasks)
    gate.release(held[0])
    assert order == ["replay", "first", "second"]
    assert gate.in_flight == 0


async def test_a_replay_that_must_not_have_what_is_free_holds_nobody_up() -> None:
    gate = _gate(Limits(server_concurrency=1, same_again_after_s=30), "a")
    replay = asyncio.create_task(gate.admit(30, frozenset({"a"}), replay=True))
    await until(lambda: gate.waiting == 1)
    gate.release(await gate.admit(30))
    replay.cancel()
    with pytest.raises(asyncio.CancelledError):
        await replay
    assert (gate.waiting, gate.in_flight) == (0, 0)


async def test_a_waiter_cancelled_as_it_is_granted_gives_the_slot_back() -> None:
    gate = _gate(Limits(server_concurrency=1), "a")
    run = await gate.admit(30)
    waiter = asyncio.create_task(gate.admit(30))
    await until(lambda: gate.waiting == 1)
    gate.release(run)  # grants the waiter, whose task has not run yet
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert gate.in_flight == 0
    gate.release(await gate.admit(30))


_STEPS = st.lists(
    st.tuples(st.sampled_from(["come", "finish", "leave", "turn", "sicken", "heal"]), st.integers(0, 7)), max_size=60
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_STEPS)
def test_whatever_happens_no_slot_is_lost_and_no_bound_is_passed(steps: list[tuple[str, int]]) -> None:
    asyncio.run(_walk(steps))


async def _walk(steps: list[tuple[str, int]]) -> None:
    gate = _gate(Limits(server_concurrency=2), "abc")
    tasks: list[asyncio.Task[Run]] = []
    released: set[asyncio.Task[Run]] = set()
    for step, number in steps:
        slots = gate.slots["abc"[number % 3]]
        held = [task for task in tasks if task.done() and not task.cancelled() and task not in released]
        if step == "come":
            excluded = frozenset({slots.upstream.id}) if number > 4 else frozenset()
            tasks.append(asyncio.create_task(gate.admit(30, excluded, replay=bool(excluded))))
        elif step == "finish" and held:
            released.add(held[number % len(held)])
            gate.release(held[number % len(held)].result())
        elif step == "leave" and tasks:
            tasks[number % len(tasks)].cancel()
        elif step == "turn":
            await asyncio.sleep(0)
        elif step in ("sicken", "heal"):
            slots.healthy = step == "heal"
            gate.pump()
        assert all(slots.in_flight <= 2 for slots in gate.slots.values())
        assert gate.in_flight == sum(slots.in_flight for slots in gate.slots.values())
    for task in tasks:
        task.cancel()
    for task, result in zip(tasks, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
        if isinstance(result, Run) and task not in released:
            gate.release(result)
        assert not isinstance(result, NoUpstream | WaitTimeout)
    assert (gate.in_flight, gate.waiting) == (0, 0)
