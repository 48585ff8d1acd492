"""The matrix of states x victims: whatever ends or hangs while a point is in whatever state, the point ends once.

No Ray, no sleeps: engines are in process, and where time matters the ledger's clock is moved on.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from pathlib import Path

import pytest

from eval_service.admission.checks import find_faults
from eval_service.contract.errors import Unavailable
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import DispatchRequest
from eval_service.controller.fleet import FORGET_S
from eval_service.ledger.database import Fenced
from eval_service.ledger.moves import Moves
from eval_service.ledger.orders import Orders
from tests.support.bounded import go
from tests.support.controller_stand import Stand

LIVE = [PointState.PINNING, PointState.RUNNING, PointState.SCORING]


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    return Stand(tmp_path, prompts=16)


async def held_in(stand: Stand, state: PointState) -> str:
    """A point that stays in a state: for want of an engine, or until `let_go`."""
    stand.put_run("r")
    if state is PointState.PINNING:
        stand.hold_updates("e0")
    if state is PointState.RUNNING:
        stand.hold_answers("e0")
    if state is PointState.SCORING:
        stand.hold_scoring()
    point = stand.dispatch("r", 1)
    await stand.until_state(point, state)
    if state is PointState.QUEUED:  # and checked: it is an engine that it waits for
        await stand.until(stand.acting._moves.runnable)
    return point


def let_go(stand: Stand) -> None:
    """Nothing is held up any more."""
    stand.release()
    stand.release_scoring()


@pytest.mark.parametrize("state", LIVE)
def test_a_controller_killed_in_any_live_state_is_followed_by_one_that_ends_the_point_once(
    stand: Stand, state: PointState
) -> None:
    async def body() -> None:
        async with stand.running(1):
            await stand.until_ready()
            point = await held_in(stand, state)
            await stand.kill_controller()
            assert stand.point(point).state is state
            stand.start_controller()
            await stand.until(lambda: stand.acting)
            let_go(stand)
            [view] = await stand.until_done(point)
            assert [attempt.outcome for attempt in view.history] == ["controller_lost", "done"]

    go(body)


@pytest.mark.parametrize("state", [PointState.RESERVED, PointState.QUEUED])
def test_a_controller_killed_while_a_point_waits_is_followed_by_one_that_ends_it_once(
    stand: Stand, state: PointState
) -> None:
    async def body() -> None:
        async with stand.running(1):
            await stand.until_ready()
            stand.put_run("r")
            orders, export, reservation = Orders(stand.database), stand.export("r", 1), str(uuid.uuid4())
            orders.pause("r")
            point = stand.intents.dispatch(DispatchRequest(run="r", step=1, reservation=reservation)).points[0].id
            if state is PointState.QUEUED:
                stand.dispatch("r", 1, export, reservation=reservation)
                await stand.until_state(point, state)
                await stand.until(lambda: not stand.acting._moves.unadmitted())
            await stand.kill_controller()
            assert stand.point(point).state is state
            stand.start_controller()
            assert stand.dispatch("r", 1, export, reservation=reservation) == point
            orders.resume("r")
            [view] = await stand.until_done(point)
            assert [attempt.outcome for attempt in view.history] == ["done"]

    go(body)


def test_the_only_engine_killed_while_a_point_is_queued_is_waited_for(stand: Stand) -> None:
    async def body() -> None:
        async with stand.running(1):
            await stand.until_ready()
            stand.put_run("r")
            orders = Orders(stand.database)
            orders.pause("r")  # a ready engine would have it at once
            point = stand.dispatch("r", 1)
            stand.kill_server("e0")
            orders.resume("r")
            [view] = await stand.until_done(point)
            assert view.attempts == 1

    go(body)


@pytest.mark.parametrize("state", LIVE)
def test_the_only_engine_killed_in_any_live_state_is_waited_for(stand: Stand, state: PointState) -> None:
    async def body() -> None:
        async with stand.running(1):
            await stand.until_ready()
            point = await held_in(stand, state)
            stand.kill_server("e0")
            let_go(stand)
            [view] = await stand.until_done(point)
            assert view.attempts == 1

    go(body)


@pytest.mark.parametrize("state", LIVE)
def test_the_only_replica_cut_off_in_any_live_state_is_lost_and_its_point_goes_on_when_it_is_back(
    stand: Stand, state: PointState
) -> None:
    async def body() -> None:
        async with stand.running(1):
            await stand.until_ready()
            point = await held_in(stand, state)
            await stand.cut_off("e0")
            silent_s = (stand.config.service.engine_lost_s + FORGET_S) / 2  # it stays known as lost for long
            stand.acting.fleet._clock = lambda: time.monotonic() + silent_s
            assert stand.link.controller is not None
            stand.link.controller.wake()
            await stand.until(lambda: stand.engine("e0").lost)
            assert stand.point(point).state is state
            stand.link.cut.clear()
            let_go(stand)
            [view] = await stand.until_done(point)
            assert view.attempts == 1

    go(body)


@pytest.mark.parametrize("state", [PointState.QUEUED, *LIVE])
def test_a_point_that_is_not_done_by_its_deadline_ends_with_a_reason(stand: Stand, state: PointState) -> None:
    async def body() -> None:
        async with stand.running(0 if state is PointState.QUEUED else 1):
            if state is not PointState.QUEUED:
                await stand.until_ready()
            point = await held_in(stand, state)
            if state is PointState.RUNNING:
                await stand.turn("e0", hang=True)
                stand.release()
            stand.clock.ahead_s = 2 * stand.config.service.point_timeout_s
            [view] = await stand.until_ended(point)
            wanted = (PointState.FAILED, Reason.DEADLINE)
            if state is PointState.QUEUED:
                wanted = (PointState.SKIPPED, Reason.UNHEALTHY)
            assert (view.state, view.reason) == wanted
            let_go(stand)
            if state is not PointState.QUEUED:
                await stand.until(lambda: stand.engine("e0").point is None)

    go(body)


@pytest.mark.parametrize("state", LIVE)
def test_a_point_cancelled_in_any_live_state_lets_its_engines_go_and_writes_nothing(
    stand: Stand, state: PointState
) -> None:
    async def body() -> None:
        async with stand.running(1):
            await stand.until_ready()
            point = await held_in(stand, state)
            moves: Moves = stand.acting._moves
            moves.end(point, PointState.CANCELLED, Reason.USER, "a test")
            await stand.until(lambda: point not in stand.acting._lanes)
            let_go(stand)
            view = stand.point(point)
            assert (view.state, view.reason, view.score) == (PointState.CANCELLED, Reason.USER, None)
            assert not list((stand.runs / "r").glob("evals/*"))
            await stand.until_done(stand.dispatch("r", 2))

    go(body)


@pytest.mark.parametrize("state", LIVE)
def test_a_controller_that_was_replaced_writes_nothing_and_commands_nothing(stand: Stand, state: PointState) -> None:
    async def body() -> None:
        async with stand.running(1):
            await stand.until_ready()
            point = await held_in(stand, state)
            old, acting = stand.link.controller, stand.acting
            assert old is not None
            stand.steal_lock()  # as where a lock was lost without a word
            stand.start_controller()
            await stand.until(lambda: old.fenced)
            assert not old.healthy()
            with pytest.raises(Fenced):
                acting._moves.advance(point, PointState.RUNNING)
            let_go(stand)
            [view] = await stand.until_done(point)
            assert [attempt.outcome for attempt in view.history] == ["controller_lost", "done"]

    go(body)


def test_two_controllers_never_both_act_and_the_second_takes_over_when_the_first_stops(stand: Stand) -> None:
    async def body() -> None:
        async with stand.running(1):
            first = stand.link.controller
            assert first is not None
            await stand.until_ready()
            second = stand.start_controller()
            for _ in range(20):
                await asyncio.sleep(0)
            assert second._acting is None
            assert second.healthy()
            first.stop()
            await stand.until(lambda: second._acting is not None)
            assert first._acting is None
            stand.put_run("r")
            await stand.until_done(stand.dispatch("r", 1))

    go(body)


@pytest.mark.parametrize("write", ["begin_attempt", "advance", "finish"])
def test_a_ledger_that_is_away_for_a_moment_costs_no_attempt(
    stand: Stand, write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 3
    real = getattr(Moves, write)

    def sometimes(self: Moves, *args: object) -> object:
        nonlocal left
        left -= 1
        if left >= 0:
            raise Unavailable("a test says so")
        return real(self, *args)

    monkeypatch.setattr(Moves, write, sometimes)

    async def body() -> None:
        async with stand.running(1):
            stand.put_run("r")
            [view] = await stand.until_done(stand.dispatch("r", 1))
            assert view.attempts == 1
            assert left < 0

    go(body)


def test_a_step_that_fails_again_and_again_makes_the_controller_unhealthy_and_hinders_no_other_step(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Moves, *args: object) -> object:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(Moves, "overdue", broken)
    monkeypatch.setattr("eval_service.controller.core.HUNG_S", 0.5)

    async def body() -> None:
        async with stand.running(1):
            stand.put_run("r")
            await stand.until_done(stand.dispatch("r", 1))
            controller = stand.link.controller
            assert controller is not None
            assert isinstance(controller.troubles["overdue"].error, KeyError)
            await stand.until(lambda: not controller.healthy())
            monkeypatch.undo()
            await stand.until(lambda: not controller.troubles)

    go(body)


def test_a_lane_whose_task_is_lost_does_not_leave_its_point_behind(stand: Stand) -> None:
    async def body() -> None:
        async with stand.running(1):
            await stand.until_ready()
            point = await held_in(stand, PointState.RUNNING)
            task = stand.lane(point).task
            assert task is not None
            task.cancel()
            let_go(stand)
            [view] = await stand.until_done(point)
            assert [attempt.outcome for attempt in view.history] == ["internal", "done"]

    go(body)


def test_a_slow_storage_check_stalls_nothing_but_the_points_of_its_snapshot(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def slow(path: Path, **options: object) -> object:
        if "/slow/" in str(path):
            gate.wait(60)
        return find_faults(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("eval_service.controller.admitting.find_faults", slow)

    async def body() -> None:
        async with stand.running(1):
            stand.put_run("slow")
            stand.put_run("r")
            stuck = [stand.dispatch("slow", step) for step in range(3)]
            await stand.until_done(stand.dispatch("r", 1), stand.dispatch("r", 2))
            assert {stand.point(point).state for point in stuck} == {PointState.QUEUED}
            gate.set()
            await stand.until_done(*stuck)

    go(body)
    gate.set()
