"""The controller over fake engines, without Ray: points, lanes, and engines that come, go and lie."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval_service.contract.states import PinProof, PointState, Reason
from eval_service.contract.wire import EngineState
from eval_service.controller.costs import Costs
from eval_service.engine.protocol import CommandKind, CommandResult, PinOrder
from eval_service.ledger.orders import Orders
from tests.support.bounded import go
from tests.support.controller_stand import HUNG_SOON, Stand


@pytest.fixture
def stand_of(tmp_path: Path) -> Callable[..., Stand]:
    return lambda **options: Stand(tmp_path, **options)


Make = Callable[..., Stand]


def test_points_of_a_run_go_through_their_states_and_end_with_one_result_each(
    stand_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval_service.controller.throughput.WINDOW_S", 600.0)  # however late it is shown

    async def body() -> None:
        async with stand_of().running(1) as stand:
            stand.put_run("r")
            points = [stand.dispatch("r", step) for step in range(3)]
            for view in await stand.until_done(*points):
                assert (view.attempts, view.pin_proof) == (1, PinProof.CANARY)
                assert view.timings.pin_s is not None
                assert view.timings.generate_s is not None
            await stand.until(lambda: stand.engine("e0").point is None)
            await stand.until(lambda: stand.views.status().tokens_per_s.get("e0"))  # of what it has just answered

    go(body)


def test_two_points_run_side_by_side_on_two_engines(stand_of: Make) -> None:
    async def body() -> None:
        async with stand_of(prompts=4).running(2) as stand:
            await stand.until_ready()
            stand.put_run("r")
            stand.hold_answers("e0", "e1")
            points = [stand.dispatch("r", step) for step in range(2)]
            for point in points:
                await stand.until_state(point, PointState.RUNNING)
            stand.release()
            [one], [two] = [view.history for view in await stand.until_done(*points)]
            assert set(one.engines).isdisjoint(two.engines)
            assert one.ended_at is not None
            assert two.started_at < one.ended_at

    go(body)


def test_an_engine_that_comes_while_a_lane_runs_joins_it_and_answers_samples(stand_of: Make) -> None:
    async def body() -> None:
        async with stand_of(prompts=40).running(1) as stand:
            stand.put_run("r")
            stand.hold_answers("e0", "late")
            point = stand.dispatch("r", 1)
            await stand.until_state(point, PointState.RUNNING)
            stand.start_engine("late")
            await stand.until(lambda: "late" in stand.lane(point).proven)
            stand.release()
            await stand.until_done(point)
            assert {sample.engine for sample in stand.samples(point)} == {"e0", "late"}

    go(body)


@pytest.mark.parametrize("engines", [1, 2])
def test_an_engine_killed_in_mid_lane_costs_no_sample_and_no_attempt(stand_of: Make, engines: int) -> None:
    async def body() -> None:
        async with stand_of(prompts=60, knobs={"latency_s": 0.05}).running(engines) as stand:
            await stand.until_ready()
            stand.put_run("r")
            point = stand.dispatch("r", 1)
            await stand.until_state(point, PointState.RUNNING)
            stand.kill_server("e0")
            [view] = await stand.until_done(point)
            assert view.attempts == 1
            await stand.until_ready()

    go(body)


FAULTS = [
    {"hang": True},
    {"unavailable": True},
    {"stale_samples": True},
    {"die": True},
]


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: next(iter(fault)))
def test_an_engine_that_goes_wrong_in_mid_lane_is_mended_and_the_point_ends_well(
    stand_of: Make, engines: int, fault: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval_service.controller.fleet.QUARANTINE_S", 0.1)

    async def body() -> None:
        stand = stand_of(prompts=60, knobs={"latency_s": 0.05}, sample_timeout_s=20.0, times=HUNG_SOON)
        async with stand.running(engines):
            await stand.until_ready()
            stand.put_run("r")
            before = stand.dispatch("r", 0)
            await stand.until_done(before)
            point = stand.dispatch("r", 1)
            await stand.until_state(point, PointState.RUNNING)
            await stand.turn("e0", **fault)
            await stand.until_done(point)
            after = stand.dispatch("r", 2)
            await stand.until_done(after)

    go(body)


@pytest.mark.parametrize("fault", ["stale_label", "wrong_weights", "refuse_update", "die_on_update"])
@pytest.mark.parametrize("engines", [1, 2])
def test_an_engine_whose_updates_go_wrong_is_found_out_and_mended(stand_of: Make, engines: int, fault: str) -> None:
    async def body() -> None:
        async with stand_of().running(engines) as stand:
            await stand.until_ready()
            stand.put_run("r")
            await stand.until_done(stand.dispatch("r", 0))
            await stand.turn("e0", **{fault: True})
            points = [stand.dispatch("r", step) for step in (1, 2)]
            for view in await stand.until_done(*points):
                assert view.attempts == 1
            await stand.until_ready()

    go(body)


def test_engines_that_go_on_telling_the_old_label_are_at_fault_and_never_the_snapshot(stand_of: Make) -> None:
    async def body() -> None:
        async with stand_of().running(2, stale_label=True) as stand:
            await stand.until_ready()
            stand.put_run("r")
            point = stand.dispatch("r", 1)
            await stand.until(lambda: all(stand.engine(name).quarantined for name in stand.runners))
            stand.start_engine("sound")
            await stand.until_done(point)

    go(body)


def test_an_engine_that_is_bad_for_good_is_quarantined_and_the_others_go_on(
    stand_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Costs, "engines_for", lambda self, suite, unsent: unsent)  # whatever a pin has taken

    async def body() -> None:
        async with stand_of().running(1) as stand:
            await stand.until_ready()
            stand.put_run("r")
            await stand.until_done(stand.dispatch("r", 0))
            stand.start_engine("a-bad", wrong_weights=True)
            await stand.until_ready()
            stand.hold_answers("e0")
            points = [stand.dispatch("r", step) for step in (1, 2, 3)]
            await stand.until(lambda: stand.engine("a-bad").state is EngineState.QUARANTINED)
            stand.release()
            await stand.until_done(*points)

    go(body)


def test_a_bad_engine_that_was_never_proven_does_not_get_the_snapshot_blamed(stand_of: Make) -> None:
    async def body() -> None:
        async with stand_of().running(0) as stand:
            stand.hold_answers("good")
            stand.start_engine("a-bad", wrong_weights=True)
            stand.start_engine("good")
            await stand.until_ready()
            stand.put_run("r")
            point = stand.dispatch("r", 0)
            await stand.until(lambda: stand.engine("a-bad").state is EngineState.QUARANTINED)
            stand.release()
            await stand.until_done(point)

    go(body)


def test_a_quarantined_engine_comes_back_once_it_was_started_anew_and_is_proven(
    stand_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval_service.controller.fleet.QUARANTINE_S", 0.3)

    async def body() -> None:
        async with stand_of().running(1) as stand:
            await stand.until_ready()
            stand.put_run("r")
            await stand.until_done(stand.dispatch("r", 0))
            nonce = stand.engine("e0").report.nonce
            stand.acting.fleet.quarantine("e0", "a test says so")
            point = stand.dispatch("r", 1)
            assert stand.engine("e0").state is EngineState.QUARANTINED
            await stand.until_done(point)
            assert stand.engine("e0").report.nonce not in (None, nonce)
            assert stand.engine("e0").strikes == 0

    go(body)


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("history", [False, True])
def test_a_poisoned_snapshot_ends_as_pin_violation_and_leaves_the_fleet_healthy(
    stand_of: Make, engines: int, history: bool
) -> None:
    async def body() -> None:
        async with stand_of().running(engines) as stand:
            await stand.until_ready()
            stand.put_run("r")
            if history:
                await stand.until_done(stand.dispatch("r", 0))
            other = stand.export("r", 7)
            poisoned = stand.export("r", 1, canary=other.manifest.canary)
            [view] = await stand.until_ended(stand.dispatch("r", 1, poisoned))
            assert (view.state, view.reason) == (PointState.SKIPPED, Reason.PIN_VIOLATION)
            await stand.until_done(stand.dispatch("r", 2))
            assert all(engine.quarantined is None for engine in stand.acting.fleet.engines.values())

    go(body)


@pytest.mark.parametrize("when", ["no handover", "between points", "within a point", "within the first point"])
def test_an_engine_that_loads_nothing_any_more_is_at_fault_also_by_what_a_former_controller_proved(
    stand_of: Make, when: str
) -> None:
    """It is the only one there is to ask; a new controller has seen nothing itself, an old one these weights last."""

    async def body() -> None:
        async with stand_of(prompts={"main": 8, "more": 8}).running(1) as stand:
            await stand.until_ready()
            stand.put_run("r")
            if when != "within the first point":
                await stand.until_done(stand.dispatch("r", 0))
            last = stand.export("r", 1)
            within = when.startswith("within")
            if within:
                stand.hold_answers("e0")
            point = stand.dispatch("r", 1, last)
            if within:
                await stand.until(lambda: stand.in_flight("e0"))
            else:
                await stand.until_done(point)
            runner = stand.runners["e0"]
            runner._group = runner._group.model_copy(update={"overrides": {"refuse_update": True}})
            await stand.turn("e0", refuse_update=True)
            if when != "no handover":
                await stand.kill_controller()
                stand.release()
                stand.start_controller()
            if not within:
                point = stand.dispatch("r", 1, last, suites=("more",))
            await stand.until(lambda: stand.engine("e0").quarantined)
            assert "good snapshot" in (stand.engine("e0").quarantined or "")
            stand.start_engine("sound")
            await stand.until_done(point)

    go(body)


def test_an_engine_that_keeps_the_weights_it_boots_with_is_at_fault_where_the_others_were_proven_before(
    stand_of: Make,
) -> None:
    """It "loads" the base model's snapshot by loading nothing."""

    async def body() -> None:
        async with stand_of(prompts={"main": 8, "more": 8}).running(1) as stand:
            await stand.until_ready()
            stand.put_run("r")
            await stand.until_done(stand.dispatch("r", 0, stand.export("r", 0, seed=0)))
            last = stand.export("r", 1)
            await stand.until_done(stand.dispatch("r", 1, last))
            runner, nonce = stand.runners["e0"], stand.engine("e0").report.nonce
            runner._group = runner._group.model_copy(update={"overrides": {"wrong_weights": True}})
            stand.kill_server("e0")
            await stand.until(lambda: stand.engine("e0").ready and stand.engine("e0").report.nonce != nonce)
            point = stand.dispatch("r", 1, last, suites=("more",))
            await stand.until(lambda: stand.engine("e0").quarantined)
            stand.start_engine("sound")
            await stand.until_done(point)

    go(body)


@pytest.mark.parametrize("deaths", [3, None])
def test_an_engine_that_dies_at_one_snapshot_alone_is_proven_twice_before_the_snapshot_is_to_blame(
    stand_of: Make, monkeypatch: pytest.MonkeyPatch, deaths: int | None
) -> None:
    """Three deaths are chance where the fourth pin is proven; one that always kills is found out."""

    async def body() -> None:
        async with stand_of().running(1) as stand:
            await stand.until_ready()
            stand.put_run("r")
            await stand.until_done(stand.dispatch("r", 0))
            fleet, pins = stand.acting.fleet, list[str]()
            send: Callable[..., asyncio.Future[CommandResult]] = fleet.send

            def deadly(engine: str, kind: CommandKind, order: PinOrder | None = None) -> asyncio.Future[CommandResult]:
                if order is not None and order.manifest.step == 1:
                    pins.append(engine)
                    if deaths is None or len(pins) <= deaths:
                        stand.kill_server(engine)
                return send(engine, kind, order)

            monkeypatch.setattr(fleet, "send", deadly)
            [view] = await stand.until_ended(stand.dispatch("r", 1))
            ends = (PointState.DONE, None) if deaths else (PointState.SKIPPED, Reason.PIN_VIOLATION)
            assert (view.state, view.reason, len(pins), view.attempts) == (*ends, 4, 1)
            await stand.until_done(stand.dispatch("r", 2))
            assert stand.engine("e0").quarantined is None

    go(body)


@pytest.mark.parametrize("fault", ["loads nothing", "dies of what others hold"])
def test_an_engine_that_may_be_at_fault_itself_has_a_second_one_asked_before_the_snapshot_is_to_blame(
    stand_of: Make, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """What it boots with it holds without loading; and what was proven once is sound."""

    async def body() -> None:
        async with stand_of().running(1) as stand:
            await stand.until_ready()
            stand.put_run("r")
            stand.put_run("q", max_engines=1)
            suspect = stand.export("r", 1)
            if fault != "loads nothing":
                await stand.until_done(stand.dispatch("r", 1, suspect))
            stand.hold_answers("e0")
            busy = stand.dispatch("q", 5)
            await stand.until(lambda: stand.lane(busy)._in_flight("e0"))
            stand.start_engine("bad", wrong_weights=fault == "loads nothing")
            await stand.until_ready()
            await stand.until_done(stand.dispatch("r", 0, stand.export("r", 0, seed=0)))  # as it boots
            send: Callable[..., asyncio.Future[CommandResult]] = stand.acting.fleet.send

            def deadly(engine: str, kind: CommandKind, order: PinOrder | None = None) -> asyncio.Future[CommandResult]:
                if order is not None and order.manifest.step == 1 and engine == "bad" and fault != "loads nothing":
                    stand.kill_server(engine)
                return send(engine, kind, order)

            monkeypatch.setattr(stand.acting.fleet, "send", deadly)
            point = stand.dispatch("r", 1, suspect)
            await stand.until(lambda: "bad" in stand.lane(point)._suspicions)
            await stand.until_ready("bad")  # the next boot of one that died would clear it of what is said of it now
            Orders(stand.database).cancel(busy)
            stand.release()
            [view] = await stand.until_done(point)
            assert view.attempts == 1
            assert {sample.engine for sample in stand.samples(point)} == {"e0"}
            assert stand.engine("bad").quarantined

    go(body)


def test_engines_of_a_lane_that_disagree_are_both_doubted_and_to_have_come_first_is_no_proof(stand_of: Make) -> None:
    """The first one lies: its samples must not become the result."""

    async def body() -> None:
        async with stand_of(prompts=40).running(0) as stand:
            stand.put_run("r")
            stand.hold_answers("liar", "e2", "e3")
            stand.start_engine("liar", wrong_weights=True, noise=1e-4)
            await stand.until_ready()
            await stand.turn("liar", noise=2e-4)  # it looks changed by the pin, and loads nothing
            point = stand.dispatch("r", 1, stand.export("r", 1, canary=None))
            await stand.until_state(point, PointState.RUNNING)
            stand.start_engine("e1")
            await stand.until(lambda: stand.engine("liar").quarantined and stand.engine("e1").quarantined)
            await stand.until(lambda: stand.point(point).history[0].outcome == "disagreement")
            view = stand.point(point)
            assert "differs from that of" in (view.history[0].detail or "")
            stand.start_engine("e2")
            stand.start_engine("e3")
            await stand.until(lambda: len(stand.lane(point).proven) == 2)
            stand.release()
            [view] = await stand.until_done(point)
            assert "liar" not in {sample.engine for sample in stand.samples(point)}
            assert view.pin_proof is PinProof.AGREEMENT

    go(body)


def test_two_engines_that_agree_win_against_the_one_that_came_first(stand_of: Make) -> None:
    async def body() -> None:
        async with stand_of(prompts=40).running(0) as stand:
            stand.put_run("r")
            stand.hold_answers("odd")
            stand.start_engine("odd", noise=1e-4)
            await stand.until_ready()
            point = stand.dispatch("r", 1, stand.export("r", 1, canary=None))
            await stand.until_state(point, PointState.RUNNING)
            stand.start_engine("e1")
            stand.start_engine("e2")
            [view] = await stand.until_done(point)
            assert view.history[0].outcome == "disagreement"
            assert "odd" not in {sample.engine for sample in stand.samples(point)}

    go(body)


def test_commands_and_results_survive_lost_answers(stand_of: Make) -> None:
    async def body() -> None:
        stand = stand_of()
        stand.link.lose_answers = 4
        async with stand.running(1):
            stand.put_run("r")
            await stand.until_done(*[stand.dispatch("r", step) for step in range(2)])
            assert stand.link.lost == 4

    go(body)


def test_an_engine_that_falls_silent_is_lost_and_one_that_speaks_again_is_proven_anew(stand_of: Make) -> None:
    async def body() -> None:
        async with stand_of(engine_lost_s=1.0).running(1) as stand:
            await stand.until_ready()
            stand.put_run("r")
            stand.hold_answers("e0")
            point = stand.dispatch("r", 1)
            await stand.until_state(point, PointState.RUNNING)
            stand.link.cut.add("e0")
            await stand.until(lambda: stand.engine("e0").lost)
            assert stand.point(point).state is PointState.RUNNING
            stand.link.cut.clear()
            stand.release()
            [view] = await stand.until_done(point)
            assert view.attempts == 1

    go(body)


def test_a_leaving_engine_gets_nothing_more_and_what_it_has_not_done_in_time_runs_elsewhere(stand_of: Make) -> None:
    async def body() -> None:
        async with stand_of(prompts=40, handover_s=0.2).running(2) as stand:
            await stand.until_ready()
            stand.put_run("r")
            stand.hold_answers("e0", "e1")
            point = stand.dispatch("r", 1)
            await stand.until(lambda: len(stand.lane(point).proven) == 2)
            await stand.until(lambda: stand.lane(point)._in_flight("e0") == 4)
            stand.runners["e0"].leave()
            stand.release("e1")
            await stand.until_done(point)
            await stand.until(lambda: stand.engine("e0").point is None)
            assert stand.engine("e0").state is EngineState.LEAVING

    go(body)


def test_an_engine_with_nothing_left_to_do_starts_the_next_point_while_the_last_samples_finish(stand_of: Make) -> None:
    async def body() -> None:
        async with stand_of(prompts=40).running(2) as stand:
            await stand.until_ready()
            stand.put_run("r")
            stand.hold_answers("e0", "e1")
            first = stand.dispatch("r", 1)
            await stand.until(lambda: len(stand.lane(first).proven) == 2)
            await stand.until(lambda: stand.lane(first)._in_flight("e0") == 4)
            stand.release("e1")
            second = stand.dispatch("r", 2)
            await stand.until_state(second, PointState.RUNNING, PointState.SCORING, PointState.DONE)
            assert stand.point(first).state is PointState.RUNNING
            stand.kill_server("e0")
            stand.release()
            await stand.until_done(first, second)

    go(body)


def test_an_attached_engine_is_pinned_proven_and_used_like_ours_and_never_ended(
    stand_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        stand = stand_of()
        async with stand.running(0), stand.somebody_elses_engine(monkeypatch) as engine:
            await stand.until_ready("theirs")
            stand.put_run("r")
            [view] = await stand.until_done(stand.dispatch("r", 1))
            assert view.history[0].engines == ("theirs",)
            poisoned = stand.export("r", 2, canary=stand.export("r", 9).manifest.canary)
            [view] = await stand.until_ended(stand.dispatch("r", 2, poisoned))
            assert view.reason is Reason.PIN_VIOLATION
            await stand.until_done(stand.dispatch("r", 3))
            await engine.api.update_weights_from_disk(str(stand.root / "boot"), "meddled")
            await stand.until(lambda: stand.engine("theirs").report.restarts == 1)
            await stand.until_done(stand.dispatch("r", 4))
            await stand.runners["theirs"].stop()
            assert (await engine.api.model_info())["weight_version"] == stand.views.points(step=4).points[
                0
            ].weight_version

    go(body)


def test_frozen_engines_are_shown_and_never_leased_or_loaded(stand_of: Make) -> None:
    async def body() -> None:
        async with stand_of(frozen=True).running(0) as stand:
            stand.start_engine("judge", group="judge")
            await stand.until_ready()
            stand.put_run("r")
            point = stand.dispatch("r", 1)
            await stand.until_state(point, PointState.QUEUED)
            stand.start_engine("e0")
            await stand.until_done(point)
            judge = stand.engine("judge")
            assert (judge.point, judge.pinned, judge.report.weight_version) == (None, None, None)
            shown = {group.name: group for group in stand.acting.fleet.view(lambda _: 0).groups}
            assert [engine.id for engine in shown["judge"].engines] == ["judge"]

    go(body)
