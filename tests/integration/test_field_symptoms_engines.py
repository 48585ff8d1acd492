"""What goes wrong with engines and routers in the field, each by its symptom, over fake engines without Ray."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from eval_service.contract.states import PinProof, PointState, Reason
from eval_service.engine.server import Server
from tests.support.controller_stand import Stand
from tests.support.inner_engine import InnerProcess

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def in_flight(server: Server) -> int:
    """Requests that an engine in this process works on."""
    process = server.process
    assert isinstance(process, InnerProcess)
    return process.engine._in_flight


async def test_an_update_that_crashes_the_server_costs_no_more_than_a_retry_on_a_healthy_engine(tmp_path: Path) -> None:
    """update_weights_from_disk crashes the server."""
    async with Stand(tmp_path).running(1, die_on_update=True) as stand:
        stand.put_run("r")
        stand.hold_answers("healthy")
        stand.start_engine("healthy")
        await stand.until_ready()
        point = stand.dispatch("r", 1)
        await stand.until(lambda: stand.engine("e0").report.restarts >= 1)
        stand.release()
        [view] = await stand.until_done(point)
        assert {sample.engine for sample in stand.samples(point)} == {"healthy"}
        assert view.state is PointState.DONE


async def test_503_for_ever_after_an_update_is_the_engines_death_at_once(tmp_path: Path) -> None:
    """One update kills the scheduler, and all later requests are 503."""
    async with Stand(tmp_path, prompts=40).running(2) as stand:
        stand.put_run("r")
        await stand.until_ready()
        stand.hold_answers("e0", "e1")
        point = stand.dispatch("r", 1)
        await stand.until(lambda: "e0" in stand.lane(point).proven)
        before = stand.engine("e0").report.nonce
        await stand.turn("e0", unavailable=True)
        stand.release()
        [view] = await stand.until_done(point)
        assert view.attempts == 1
        after = stand.dispatch("r", 2)
        await stand.until(lambda: stand.engine("e0").report.nonce != before)
        await stand.until_done(after)


async def test_old_weights_under_the_new_label_are_caught_by_the_canary(tmp_path: Path) -> None:
    """A version label is published although the load failed, and the engine is put back into rotation."""
    async with Stand(tmp_path).running(1, wrong_weights=True, noise=1e-3) as stand:
        stand.put_run("r")
        stand.hold_answers("sound")
        stand.start_engine("sound")
        await stand.until_ready()
        await stand.turn("e0", noise=0.0)  # something changed, so that only the canary can tell
        point = stand.dispatch("r", 1)
        await stand.until(lambda: stand.engine("e0").report.restarts >= 1)
        stand.release()
        [view] = await stand.until_done(point)
        assert view.pin_proof is PinProof.CANARY
        assert {sample.engine for sample in stand.samples(point)} == {"sound"}


async def test_an_engine_left_paused_after_an_update_is_found_out_by_its_pin_and_started_anew(tmp_path: Path) -> None:
    """An engine is left paused after the update, and everything waits for ever."""
    async with Stand(tmp_path, pin_timeout_s=2.0).running(1) as stand:
        stand.put_run("r")
        await stand.until_ready()
        await stand.turn("e0", paused_by_update=True)
        point = stand.dispatch("r", 1)
        await stand.until(lambda: stand.engine("e0").report.restarts >= 1)
        await stand.until_done(point)


async def test_five_oversize_prompts_leave_the_engine_in_use_for_a_normal_one(tmp_path: Path) -> None:
    """A 4xx (the prompt is too long) trips the circuit breaker, until there is no worker left."""
    async with Stand(tmp_path, prompts=6, oversize=5).running(1) as stand:
        stand.put_run("r")
        await stand.until_ready()
        [view] = await stand.until_ended(stand.dispatch("r", 1))
        assert (view.state, view.reason) == (PointState.FAILED, Reason.ERROR_RATE)
        assert stand.engine("e0").quarantined is None
        assert stand.engine("e0").report.restarts == 0
        assert not stand.acting._router.stats().faults


async def test_all_engines_die_and_the_queue_goes_on_with_the_one_that_comes_back(tmp_path: Path) -> None:
    """The router won't start with one bad worker, and loops in panic after all workers die."""
    async with Stand(tmp_path, engine_lost_s=2.0).running(2) as stand:
        stand.put_run("r")
        stand.hold_answers("e0", "e1")
        stand.start_engine("bad", boot_fails=True)
        await stand.until_ready("e0", "e1")
        points = [stand.dispatch("r", step) for step in (1, 2, 3)]
        # With whichever of the points: they are checked side by side, and the first to have passed gets both engines.
        await stand.until(lambda: stand.in_flight("e0") and stand.in_flight("e1"))
        for name in ("e0", "e1"):
            stand.link.cut.add(name)
            stand.kill_server(name)
        await stand.until(lambda: all(stand.engine(name).lost for name in ("e0", "e1")))
        stand.link.cut.discard("e1")
        stand.release()
        for view in await stand.until_done(*points):
            assert view.attempts == 1


async def test_a_busy_engine_whose_health_check_takes_long_is_not_killed(tmp_path: Path) -> None:
    """A busy engine (long prefill, cold compile) is judged dead and killed: its health answers after 25 s under load.

    Its answer takes a tenth of that here: 2.5 s, and an engine counts as hung after 60.
    """
    async with Stand(tmp_path, prompts=12, knobs={"latency_s": 1.0}).running(1) as stand:
        stand.put_run("r")
        await stand.until_ready()
        await stand.turn("e0", health_s=2.5)
        nonce = stand.engine("e0").report.nonce
        await stand.until_done(stand.dispatch("r", 1))
        assert (stand.engine("e0").report.nonce, stand.engine("e0").report.restarts) == (nonce, 0)


async def test_an_engine_by_its_url_is_filled_to_its_concurrency_and_who_waits_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool is sized from the trainer's GPUs (one, with external engines), or is the default: it serializes."""
    async with Stand(tmp_path, prompts=200, server_concurrency=64).running(0) as stand:
        stand.put_run("r")
        async with stand.somebody_elses_engine(monkeypatch):
            await stand.until(lambda: stand.engine("theirs").ready)
            stand.hold_answers("theirs")
            point = stand.dispatch("r", 1)
            await stand.until(lambda: stand.acting._router.stats().targets[point].in_flight == 64)
            stats = stand.acting._router.stats()
            gate, answered = stats.targets[point], stats.totals.answered
            assert (gate.capacity, gate.peak, gate.waiting) == (64, 64, 200 - 64 - answered)
            await stand.until(lambda: stand.views.fleet().pool.waiting)  # as /fleet and /metrics tell it
            assert stand.views.fleet().pool.capacity == 64
            stand.release()
            await stand.until_done(point)


async def test_a_pin_while_requests_still_run_ends_them_first_and_old_requests_keep_the_old_label(
    tmp_path: Path,
) -> None:
    """The cache flush asserts when requests still run during an update."""
    async with Stand(tmp_path, prompts=1).running(1) as stand:
        stand.put_run("r")
        await stand.until_ready()
        first = stand.dispatch("r", 1)
        [view] = await stand.until_done(first)
        server = stand.runners["e0"]._server
        assert server is not None
        await stand.turn("e0", latency_s=30.0)
        body: dict[str, Any] = {"text": "old", "sampling_params": {"max_new_tokens": 4}}
        old = asyncio.create_task(server.api.generate(body))
        await stand.until(lambda: in_flight(server) == 1)
        await stand.turn("e0", latency_s=0.0)
        second = stand.dispatch("r", 2)
        answer = await old
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert answer["meta_info"]["weight_version"] == view.weight_version
        await stand.until_done(second)
        assert stand.engine("e0").report.restarts == 0
