"""A replica's runner over a real supervisor and a real process: the fake engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from eval_service.contract.wire import EngineState
from eval_service.engine.errors import EngineFatal
from eval_service.engine.pin import Clock, Pinner, SystemClock
from eval_service.engine.protocol import CommandKind, EngineReport, PinError, PinEvidence, PinOrder
from eval_service.engine.runner import EngineRunner, RunnerTimes
from eval_service.engine.server import BootOptions
from eval_service.fleet_config import GroupConfig
from eval_service.objects.places import Places
from tests.support.engine_link import TestLink
from tests.support.engine_model import TinyModel, make_model
from tests.support.processes import alive, tree

# The health checks' period is nobody else's sleep: a clock tells them by it.
TIMES = RunnerTimes(poll_timeout_s=5.0, backoff_s=0.05, health_period_s=0.125, hung_s=60.0)


class Fleet:
    """One runner, its link, and models to pin."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.link = TestLink()
        self.boot = make_model(root / "boot", seed=0)
        self.a = make_model(root / "a", seed=1)
        self.b = make_model(root / "b", seed=2)

    @asynccontextmanager
    async def runner(
        self, places: Places | None = None, clock: Clock | None = None, **overrides: Any
    ) -> AsyncIterator[EngineRunner]:
        """A runner that runs; whatever happens, its processes are gone afterwards."""
        group = GroupConfig.model_validate(
            {"model": self.boot.path, "grade": "fake", "overrides": overrides, "start_timeout_s": 60}
        )
        options = BootOptions(log=self.root / "logs" / "engine.log")
        runner = EngineRunner(
            "engine-1",
            "eval",
            group,
            node="here",
            options=options,
            link=self.link,
            times=TIMES,
            places=places,
            clock=clock,
        )
        others = set(psutil.Process().children())  # such as what the session's fixtures have started
        running = asyncio.create_task(runner.run())
        try:
            yield runner
        finally:
            await runner.stop()
            await running
            assert set(psutil.Process().children()) <= others  # what those start themselves is theirs

    async def ready(self) -> EngineReport:
        """The report of an engine that is up."""
        return await self.link.until(lambda report: report.state is EngineState.READY)

    async def new_nonce(self, old: EngineReport) -> EngineReport:
        """The report of the next boot."""
        return await self.link.until(
            lambda report: report.state is EngineState.READY and report.nonce not in (None, old.nonce)
        )

    async def pin(self, model: TinyModel, label: str, **order: Any) -> Any:
        """Pin a model with the canary that it must reproduce."""
        return await self.link.pin(model.path, model.proven(), label, **order)


async def turn(runner: EngineRunner, **knobs: Any) -> None:
    """Turn knobs of the fake at run time."""
    assert runner._server is not None
    keys = runner._server.keys
    async with aiohttp.ClientSession() as session:
        headers = {"authorization": f"Bearer {keys.admin}"}
        async with session.post(f"{runner._server.url}/_knobs", json=knobs, headers=headers) as answer:
            assert answer.status == 200


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def go(body: Callable[[], Awaitable[None]]) -> None:
    """Run a test's body under a deadline."""

    async def bounded() -> None:
        async with asyncio.timeout(100):
            await body()

    asyncio.run(bounded())


def test_what_was_proven_by_a_canary_last_is_recalled_whatever_became_of_the_server_and_of_later_pins(
    fleet: Fleet,
) -> None:
    async def body() -> None:
        async with fleet.runner():
            up = await fleet.ready()
            assert not up.recalls
            assert (await fleet.link.done(fleet.link.give(CommandKind.RECALL))).recalled == ()
            assert (await fleet.link.pin(fleet.b.path, fleet.b.manifest, "unproven")).ok
            assert not fleet.link.reports[-1].recalls
            assert (await fleet.pin(fleet.a, "proven")).ok
            await fleet.link.done(fleet.link.give(CommandKind.RESTART))
            assert (await fleet.new_nonce(up)).recalls
            assert not (await fleet.link.pin(fleet.b.path, fleet.a.proven(), "wrong", timeout_s=2.0)).ok
            for model, label in ((fleet.boot, "2"), (fleet.a, "3"), (fleet.b, "4"), (fleet.a, "5")):
                assert (await fleet.pin(model, label)).ok
            told = (await fleet.link.done(fleet.link.give(CommandKind.RECALL, epoch=2))).recalled
            assert [order.weight_version for order in told] == ["5", "4"]
            assert [order.manifest for order in told] == [fleet.a.proven(), fleet.b.proven()]

    go(body)


def test_a_runner_reports_starting_then_ready_with_all_that_a_lane_needs(fleet: Fleet) -> None:
    async def body() -> None:
        async with fleet.runner() as runner:
            report = await fleet.ready()
            assert fleet.link.reports[0].state is EngineState.STARTING
            assert (report.engine, report.group, report.node) == ("engine-1", "eval", "here")
            assert (report.vocab_size, report.context_length) == (128, 256)
            assert report.replica_pid == os.getpid()
            assert report.server_pid in {child.pid for child in tree(report.supervisor_pid or 0)}
            async with aiohttp.ClientSession() as session:
                request = {"text": "hi", "sampling_params": {"max_new_tokens": 16}}
                headers = {"authorization": f"Bearer {report.api_key}"}
                async with session.post(f"{report.url}/generate", json=request, headers=headers) as answer:
                    assert answer.status == 200
            await runner.check_health()

    go(body)


def test_a_pin_is_proven_and_told_and_the_next_one_too(fleet: Fleet) -> None:
    async def body() -> None:
        async with fleet.runner():
            await fleet.ready()
            first, second = await fleet.pin(fleet.a, "a.1"), await fleet.pin(fleet.b, "b.1")
            assert first.ok
            assert second.ok
            assert first.evidence.fingerprint != second.evidence.fingerprint
            report = await fleet.link.until(lambda report: report.weight_version == "b.1")
            assert report.state is EngineState.READY
            assert any(seen.state is EngineState.PINNING for seen in fleet.link.reports)

    go(body)


@pytest.mark.parametrize(
    ("knob", "error"),
    [
        ("stale_label", PinError.LABEL),
        ("wrong_weights", PinError.UNCHANGED),
        ("refuse_update", PinError.REFUSED),
        ("die_on_update", PinError.DIED),
    ],
)
def test_each_fault_of_an_engine_fails_its_pin_with_its_own_reason(fleet: Fleet, knob: str, error: PinError) -> None:
    async def body() -> None:
        async with fleet.runner() as runner:
            report = await fleet.ready()
            await turn(runner, **{knob: True})
            result = await fleet.pin(fleet.a, "a.1")
            assert (result.ok, result.error) == (False, error)
            if error is PinError.DIED:
                report = await fleet.new_nonce(report)
            assert fleet.link.reports[-1].weight_version is None

    go(body)


def test_noise_in_the_log_probs_fails_the_canary(fleet: Fleet) -> None:
    async def body() -> None:
        async with fleet.runner(noise=0.01):
            await fleet.ready()
            assert (await fleet.pin(fleet.a, "a.1")).error is PinError.CANARY

    go(body)


def test_a_load_that_takes_too_long_ends_at_the_pins_deadline_and_the_engine_can_be_pinned_again(fleet: Fleet) -> None:
    async def body() -> None:
        async with fleet.runner(update_s=30.0) as runner:
            report = await fleet.ready()
            assert (await fleet.pin(fleet.a, "a.1", timeout_s=0.5)).error is PinError.TIMEOUT
            await turn(runner, update_s=0.0)
            fleet.link.give(CommandKind.RESTART)
            await fleet.new_nonce(report)

    go(body)


def test_a_server_that_dies_while_its_snapshot_is_fetched_is_told_at_once(fleet: Fleet) -> None:
    class Slow(Places):
        @asynccontextmanager
        async def near(self, snapshot: str, digest: str | None) -> AsyncIterator[Path]:
            fetching.set()
            await asyncio.Event().wait()
            yield Path(snapshot)

    fetching = asyncio.Event()

    async def body() -> None:
        async with fleet.runner(Slow()):
            report = await fleet.ready()
            order = PinOrder("s3://bucket/run/step_1-00000000", fleet.a.proven(), "a.1", 60.0, 5.0)
            name = fleet.link.give(CommandKind.PIN, pin=order)
            await fetching.wait()
            assert report.server_pid is not None
            os.kill(report.server_pid, signal.SIGKILL)
            assert (await fleet.link.done(name)).error is PinError.DIED
            await fleet.new_nonce(report)

    go(body)


def test_a_command_of_an_older_epoch_is_refused_and_harms_nothing(fleet: Fleet) -> None:
    async def body() -> None:
        async with fleet.runner():
            await fleet.ready()
            assert (await fleet.pin(fleet.a, "a.1", epoch=5)).ok
            stale = await fleet.pin(fleet.b, "b.1", epoch=4)
            assert stale.error is PinError.STALE_EPOCH
            assert fleet.link.reports[-1].weight_version == "a.1"

    go(body)


def test_a_command_that_is_given_twice_runs_once(fleet: Fleet) -> None:
    async def body() -> None:
        async with fleet.runner():
            report = await fleet.ready()
            fleet.link.give(CommandKind.RESTART, name="once")
            fleet.link.give(CommandKind.RESTART, name="once")
            await fleet.link.done("once")
            await fleet.pin(fleet.a, "a.1")
            last = fleet.link.reports[-1]
            assert last.restarts == 1
            assert last.nonce != report.nonce

    go(body)


def test_a_result_is_told_until_a_poll_that_carried_it_returned(fleet: Fleet) -> None:
    async def body() -> None:
        async with fleet.runner(update_s=0.3):
            await fleet.ready()
            pin = asyncio.create_task(fleet.pin(fleet.a, "a.1"))
            await fleet.link.until(lambda report: report.state is EngineState.PINNING)
            fleet.link.cut = True
            told = len(fleet.link.reports)
            await fleet.link.until(lambda _: any(report.results for report in fleet.link.unheard))
            assert len(fleet.link.reports) == told
            fleet.link.cut = False
            assert (await pin).ok
            await fleet.link.until(lambda report: not report.results)

    go(body)


def test_serving_goes_on_while_no_controller_can_be_reached_whatever_the_link_raises(fleet: Fleet) -> None:
    async def body() -> None:
        fleet.link.failure = RuntimeError("an actor died")
        async with fleet.runner() as runner:
            report = await fleet.ready()
            fleet.link.cut = True
            async with aiohttp.ClientSession() as session:
                headers = {"authorization": f"Bearer {report.api_key}"}
                async with session.post(f"{report.url}/generate", json={"text": "hi"}, headers=headers) as answer:
                    assert answer.status == 200
            await runner.check_health()
            fleet.link.cut = False
            seen = len(fleet.link.reports)
            await fleet.link.until(lambda _: len(fleet.link.reports) > seen)
            assert fleet.link.reports[-1].nonce == report.nonce

    go(body)


def test_a_server_that_hangs_is_started_anew_with_another_nonce(fleet: Fleet) -> None:
    class Unlooked(SystemClock):
        async def sleep(self, seconds: float) -> None:
            if seconds == TIMES.health_period_s:
                await hangs.wait()
            await super().sleep(seconds)

    hangs = asyncio.Event()

    async def body() -> None:
        async with fleet.runner(clock=Unlooked()) as runner:
            report = await fleet.ready()
            old = tree(report.server_pid or 0)
            await turn(runner, hang=True)
            runner._times = replace(TIMES, hung_s=2.0)  # nobody has looked: before, it was starved at most
            hangs.set()
            fresh = await fleet.new_nonce(report)
            assert fresh.restarts == 1
            assert fresh.api_key != report.api_key
            assert alive(old) == []

    go(body)


def test_a_restart_on_command_forgets_the_pin_and_is_told(fleet: Fleet) -> None:
    async def body() -> None:
        async with fleet.runner():
            report = await fleet.ready()
            await fleet.pin(fleet.a, "a.1")
            assert (await fleet.link.done(fleet.link.give(CommandKind.RESTART))).ok
            fresh = await fleet.new_nonce(report)
            assert fresh.weight_version is None
            assert (await fleet.pin(fleet.a, "a.2")).ok

    go(body)


def test_leaving_is_told_and_serving_goes_on_until_stop(fleet: Fleet) -> None:
    async def body() -> None:
        async with fleet.runner() as runner:
            report = await fleet.ready()
            assert (await fleet.link.done(fleet.link.give(CommandKind.LEAVE))).ok
            leaving = await fleet.link.until(lambda seen: seen.state is EngineState.LEAVING)
            assert leaving.nonce == report.nonce
            assert runner.state is EngineState.LEAVING

    go(body)


def test_two_failed_starts_in_a_row_are_fatal_and_say_why(fleet: Fleet) -> None:
    async def body() -> None:
        async with fleet.runner(boot_fails=True) as runner:
            lost = await fleet.link.until(lambda report: report.state is EngineState.LOST)
            assert "the boot fails" in (lost.detail or "")
            with pytest.raises(EngineFatal, match="2 times"):
                await runner.check_health()

    go(body)


def test_a_configuration_that_cannot_work_is_fatal_at_once(fleet: Fleet) -> None:
    async def body() -> None:
        async with fleet.runner(model_path="/elsewhere") as runner:
            await fleet.link.until(lambda report: report.state is EngineState.LOST)
            with pytest.raises(EngineFatal, match=r"overrides\.model_path"):
                await runner.check_health()

    go(body)


def test_stopping_while_it_boots_leaves_nothing(fleet: Fleet) -> None:
    async def body() -> None:
        async with fleet.runner(boot_s=30.0):
            await fleet.link.until(lambda report: report.state is EngineState.STARTING)

    go(body)


def test_a_pin_that_fails_as_nobody_thought_of_fails_alone_and_the_next_one_works(fleet: Fleet) -> None:
    class Broken(Pinner):
        async def pin(self, order: PinOrder) -> PinEvidence:
            raise ZeroDivisionError("a mistake")

    async def body() -> None:
        async with fleet.runner() as runner:
            await fleet.ready()
            assert runner._server is not None
            right = runner._server.pinner
            runner._server.pinner = Broken(right._api, right._facts, right._clock)
            result = await fleet.pin(fleet.a, "one")
            assert (result.ok, result.error) == (False, PinError.REFUSED)
            assert "ZeroDivisionError" in result.detail
            runner._server.pinner = right
            assert (await fleet.pin(fleet.a, "two")).ok
            await runner.check_health()

    go(body)
