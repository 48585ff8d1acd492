"""What the controller knows of engines, and the commands that go to them, over a clock that the tests move."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from eval_service.contract.wire import EngineState
from eval_service.controller import fleet as fleets
from eval_service.controller.engines import Good
from eval_service.controller.fleet import Fleet
from eval_service.engine.protocol import (
    Command,
    CommandKind,
    CommandResult,
    EngineReport,
    PinError,
    PinEvidence,
    PinOrder,
)
from eval_service.fleet_config import GroupConfig

GROUP = GroupConfig.model_validate({"model": "/m", "grade": "fake"})


class Bench:
    """A fleet, a clock, and one engine that reports by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.changes = 0
        groups = {"eval": GROUP, "judge": GROUP.model_copy(update={"kind": "frozen"})}
        self.fleet = Fleet(groups, epoch=7, lost_after_s=5.0, on_change=self._changed, clock=lambda: self.now)
        self.number = 0

    def _changed(self) -> None:
        self.changes += 1

    def report(self, **values: Any) -> EngineReport:
        """The next report of a ready engine."""
        self.number += 1
        given = {
            "engine": "e",
            "group": "eval",
            "node": "n",
            "state": EngineState.READY,
            "replica_pid": 1,
            "nonce": "n1",
            "number": self.number,
            **values,
        }
        return EngineReport(**given)

    async def poll(self, report: EngineReport | None = None, **values: Any) -> Command | None:
        """A poll that is answered at once, with a command or with none."""
        poll = asyncio.create_task(self.fleet.poll(report or self.report(**values)))
        for _ in range(3):
            await asyncio.sleep(0)
        if poll.done():
            return poll.result()
        poll.cancel()
        await asyncio.gather(poll, return_exceptions=True)
        return None


@pytest.fixture
def bench() -> Bench:
    return Bench()


def go(body: Callable[[], Awaitable[None]]) -> None:
    """Run a test's body."""
    asyncio.run(asyncio.wait_for(body(), 20))


def test_a_command_is_handed_out_again_until_a_report_says_that_it_was_taken(bench: Bench) -> None:
    async def body() -> None:
        await bench.poll()
        future = bench.fleet.send("e", CommandKind.RESTART)
        first, again = await bench.poll(), await bench.poll()
        assert first is not None
        assert first == again
        assert first.epoch == 7
        assert await bench.poll(taken=(first.id,)) is None
        assert not bench.fleet.free()
        await bench.poll(results=(CommandResult(first.id, ok=True),))
        assert (await future).ok
        assert [engine.id for engine in bench.fleet.free()] == ["e"]

    go(body)


def test_a_command_reaches_the_oldest_of_several_polls_that_are_open_and_runs_once(bench: Bench) -> None:
    async def body() -> None:
        polls = [asyncio.create_task(bench.fleet.poll(bench.report())) for _ in range(3)]
        await asyncio.sleep(0)
        bench.fleet.send("e", CommandKind.RESTART)
        answers = await asyncio.gather(*polls)
        assert len({command.id for command in answers if command}) == 1, "a replica runs an id once"

    go(body)


def test_a_report_that_was_overtaken_on_its_way_changes_nothing_but_its_results_count(bench: Bench) -> None:
    async def body() -> None:
        old = bench.report(state=EngineState.STARTING, nonce=None)
        await bench.poll(nonce="n2")
        await bench.poll(old)
        engine = bench.fleet.engines["e"]
        assert (engine.report.nonce, engine.ready) == ("n2", True)
        future = bench.fleet.send("e", CommandKind.RESTART)
        command = await bench.poll()
        assert command is not None
        late = bench.report(results=(CommandResult(command.id, ok=True),))
        await bench.poll(nonce="n2")
        await bench.poll(late)
        assert future.done()
        assert engine.report.nonce == "n2"

    go(body)


def test_a_command_that_nobody_waits_for_is_taken_back_only_while_nobody_can_have_it(bench: Bench) -> None:
    async def body() -> None:
        await bench.poll()
        bench.fleet.send("e", CommandKind.PIN).cancel()
        await asyncio.sleep(0)
        assert await bench.poll() is None
        assert bench.fleet.free()
        future = bench.fleet.send("e", CommandKind.PIN)
        command = await bench.poll()
        assert command is not None
        future.cancel()
        await asyncio.sleep(0)
        assert not bench.fleet.free(), "it may be at work on it"
        await bench.poll(results=(CommandResult(command.id, ok=True),))
        assert bench.fleet.free()

    go(body)


@pytest.mark.parametrize("nonce", [None, "n2"])
def test_what_an_engine_was_proven_to_hold_is_gone_with_its_boot(bench: Bench, nonce: str | None) -> None:
    async def body() -> None:
        order: Any = object()
        await bench.poll()
        pin = bench.fleet.send("e", CommandKind.PIN, order)
        command = await bench.poll()
        assert command is not None
        await bench.poll(results=(CommandResult(command.id, ok=True),))
        assert (await pin).ok
        assert bench.fleet.engines["e"].pinned is order
        await bench.poll(nonce=nonce, state=EngineState.RESTARTING)
        assert bench.fleet.engines["e"].pinned is None

    go(body)


def test_a_new_nonce_ends_pins_under_way_and_restarts_go_on(bench: Bench) -> None:
    async def body() -> None:
        await bench.poll()
        pin, restart = bench.fleet.send("e", CommandKind.PIN), bench.fleet.send("e", CommandKind.RESTART)
        await bench.poll(nonce=None, state=EngineState.RESTARTING)
        assert (await pin).error is PinError.DIED
        assert not restart.done()
        assert bench.fleet.engines["e"].pinned is None

    go(body)


def test_who_waits_for_an_engine_hears_at_once_that_what_nobody_waits_for_any_more_is_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "POLL_S", 3600.0)  # no look of its own would find it

    async def body() -> None:
        await bench.poll()
        bench.fleet.engines["e"].point = "p"
        given_up = bench.fleet.send("e", CommandKind.PIN)
        command = await bench.poll()
        assert command is not None
        given_up.cancel()
        waiting = asyncio.create_task(bench.fleet.wait_ready("e", 3600.0))
        await asyncio.sleep(0)
        await bench.poll(results=(CommandResult(command.id, ok=False, error=PinError.TIMEOUT),))
        assert await waiting

    go(body)


def test_the_poll_of_an_engine_that_is_nobodys_is_held_for_longer_and_is_no_silence(bench: Bench) -> None:
    async def body() -> None:
        await bench.poll()
        engine = bench.fleet.engines["e"]
        for point, silent_at in (("p", 1.0 + 5.0), (None, 2.5 + 5.0)):
            engine.point = point
            poll = asyncio.create_task(bench.fleet.poll(bench.report()))
            await asyncio.sleep(0)
            began = bench.now
            bench.now = began + silent_at
            assert not bench.fleet.expire()
            bench.now += 0.1
            assert [lost.id for lost in bench.fleet.expire()] == ["e"]
            poll.cancel()
            await asyncio.gather(poll, return_exceptions=True)

    go(body)


def test_the_end_of_an_older_poll_says_nothing_of_a_newer_one_that_is_held(bench: Bench) -> None:
    async def body() -> None:
        polls = []
        for _ in range(2):
            polls.append(asyncio.create_task(bench.fleet.poll(bench.report())))
            await asyncio.sleep(0)
            bench.now += 1.0
        polls[0].cancel()
        await asyncio.gather(polls[0], return_exceptions=True)
        assert bench.fleet.engines["e"].heard_at == 1.0 + 2.5
        polls[1].cancel()
        await asyncio.gather(polls[1], return_exceptions=True)
        assert bench.fleet.engines["e"].heard_at == 2.0

    go(body)


def order_of(digest: str) -> PinOrder:
    manifest: Any = SimpleNamespace(digest=digest, tensor_digest=digest)
    return PinOrder("/s", manifest, "v")


def digests(goods: tuple[Good, ...]) -> list[str]:
    return [good.order.manifest.digest for good in goods]


def test_what_an_engine_was_proven_to_hold_under_a_former_controller_is_asked_for_once_and_known(bench: Bench) -> None:
    evidence = PinEvidence("v", "f", "logprobs", 0.0, 0.0, 0.0, 0.0)

    async def body() -> None:
        assert await bench.poll() is None, "there is nothing to tell"
        for name in ("old", "new"):
            command = await bench.poll(engine=name, recalls=True)
            assert command is not None
            assert command.kind is CommandKind.RECALL
            assert name not in {engine.id for engine in bench.fleet.free()}
            if name == "new":
                bench.fleet.prove("new", Good(order_of("c"), evidence))
            told = CommandResult(command.id, ok=True, recalled=(order_of("b"), order_of("a")))
            await bench.poll(engine=name, recalls=True, results=(told,))
            assert await bench.poll(engine=name, recalls=True) is None
        known = {name: digests(engine.goods) for name, engine in bench.fleet.engines.items()}
        assert known == {"e": [], "old": ["b", "a"], "new": ["c", "b"]}
        assert digests(bench.fleet.goods) == ["c", "b"]
        assert bench.fleet.proven == {"a", "b", "c"}
        assert {engine.id for engine in bench.fleet.free()} == {"e", "old", "new"}
        bench.fleet.prove("new", Good(order_of("b"), evidence))
        assert digests(bench.fleet.engines["new"].goods) == ["b", "c"], "of the same weights it keeps one"

    go(body)


def test_an_engine_that_comes_to_recall_something_or_was_lost_before_it_told_is_asked_then(bench: Bench) -> None:
    async def body() -> None:
        await bench.poll(state=EngineState.PINNING)  # for a controller that is gone, and for the first time
        for _ in range(2):
            command = await bench.poll(recalls=True)
            assert command is not None
            assert command.kind is CommandKind.RECALL
            bench.now += 5.1
            assert [engine.id for engine in bench.fleet.expire()] == ["e"]
            await asyncio.sleep(0)
            assert not bench.fleet.engines["e"].goods

    go(body)


def test_a_silent_engine_is_lost_its_commands_with_it_and_it_may_come_back(bench: Bench) -> None:
    async def body() -> None:
        await bench.poll()
        future = bench.fleet.send("e", CommandKind.RESTART)
        bench.now = 5.1
        assert [engine.id for engine in bench.fleet.expire()] == ["e"]
        assert (await future).error is PinError.DIED
        assert not bench.fleet.free()
        await bench.poll()
        assert bench.fleet.free()
        bench.now += fleets.FORGET_S + 10
        bench.fleet.expire()
        bench.fleet.expire()
        assert bench.fleet.engines == {}

    go(body)


def test_a_quarantined_engine_is_started_anew_after_a_while_and_later_each_time_that_it_fails_again(
    bench: Bench,
) -> None:
    async def body() -> None:
        await bench.poll()
        engine = bench.fleet.engines["e"]
        for strike in range(3):
            bench.fleet.quarantine("e", "a test")
            assert not bench.fleet.free()
            bench.now += fleets.QUARANTINE_S * 2**strike - 1
            bench.fleet.heal()
            assert not engine.sent
            bench.now += 2
            bench.fleet.heal()
            command = await bench.poll()
            assert command is not None
            assert command.kind is CommandKind.RESTART
            await bench.poll(nonce=f"after-{strike}", results=(CommandResult(command.id, ok=True),))
            assert bench.fleet.free()

    go(body)


def test_an_engine_that_cannot_be_started_anew_gets_its_chance_as_it_is(bench: Bench) -> None:
    async def body() -> None:
        await bench.poll()
        bench.fleet.quarantine("e", "a test")
        bench.now += fleets.QUARANTINE_S
        bench.fleet.heal()
        command = await bench.poll()
        assert command is not None
        await bench.poll(results=(CommandResult(command.id, ok=False, error=PinError.REFUSED),))
        await asyncio.sleep(0)
        assert bench.fleet.free()

    go(body)


def test_useless_answers_of_one_boot_end_in_quarantine_and_those_of_former_boots_do_not_count(bench: Bench) -> None:
    async def body() -> None:
        await bench.poll()
        for _ in range(fleets.MAX_USELESS - 1):
            bench.fleet.useless("e", "stale")
        assert bench.fleet.free()
        await bench.poll(nonce="n2")
        bench.fleet.useless("e", "stale")
        assert bench.fleet.free()
        for _ in range(fleets.MAX_USELESS - 1):
            bench.fleet.useless("e", "stale")
        assert bench.fleet.engines["e"].state is EngineState.QUARANTINED

    go(body)


def test_an_engine_that_leaves_is_told_once_that_it_may_go_when_nothing_of_it_is_needed(bench: Bench) -> None:
    async def body() -> None:
        await bench.poll()
        engine = bench.fleet.engines["e"]
        engine.point = "p"
        await bench.poll(state=EngineState.LEAVING)
        bench.fleet.release()
        assert not engine.sent
        engine.point = None
        for _ in range(2):
            bench.fleet.release()
        command = await bench.poll(state=EngineState.LEAVING)
        assert command is not None
        assert command.kind is CommandKind.LEAVE
        assert len(engine.sent) == 1

    go(body)


def test_frozen_engines_are_never_free_to_lease(bench: Bench) -> None:
    async def body() -> None:
        await bench.poll(engine="judge", group="judge")
        assert bench.fleet.engines["judge"].ready
        assert bench.fleet.free() == []

    go(body)


@pytest.mark.parametrize(("released", "shown"), [(True, []), (False, [EngineState.LOST])])
def test_an_engine_that_left_in_good_order_is_forgotten_and_one_that_was_cut_off_is_shown_as_lost(
    bench: Bench, released: bool, shown: list[EngineState]
) -> None:
    async def body() -> None:
        await bench.poll()
        await bench.poll(state=EngineState.LEAVING)
        if released:
            bench.fleet.release()
        bench.now = 6.0
        assert len(bench.fleet.expire()) == len(shown)

    go(body)
    (group, _) = bench.fleet.view(lambda _: 0).groups
    assert ([engine.state for engine in group.engines], group.actual) == (shown, 0)
