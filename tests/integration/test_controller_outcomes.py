"""What a point may come to that is nobody's death: bad answers, bad scorers, files that hide, what lies on storage."""

from __future__ import annotations

import asyncio
import json
import shutil
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from eval_service.contract import names
from eval_service.contract.outbox import Outbox
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import DispatchRequest, DrainRequest, OnTimeout, PointView
from eval_service.suites.scoring import Score, ScorerCall, ScorerPool, ScorerPoolFailed
from tests.support.bounded import go
from tests.support.controller_stand import Stand


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    return Stand(tmp_path)


def scoring(stand: Stand, score: Callable[[Sequence[str]], Awaitable[list[Score]]]) -> None:
    """Have the acting controller score so."""
    pool: ScorerPool = stand.acting._lane_parts.scorers

    async def scored(scorer: str | ScorerCall, outputs: Sequence[str], answers: Sequence[str]) -> list[Score]:
        return await score(outputs)

    pool.score = scored  # type: ignore[method-assign]


def test_too_many_errored_samples_fail_the_point_rather_than_dip_the_curve(stand: Stand) -> None:
    async def half(outputs: Sequence[str]) -> list[Score]:
        return [Score(None, "no score") if n % 2 else Score(1.0) for n, _ in enumerate(outputs)]

    async def body() -> None:
        async with stand.running(1):
            await stand.until_ready()
            scoring(stand, half)
            stand.put_run("r")
            [view] = await stand.until_ended(stand.dispatch("r", 1))
            assert (view.state, view.reason, view.attempts) == (PointState.FAILED, Reason.ERROR_RATE, 1)
            assert "50.0% of the samples errored, such as: no score" in (view.detail or "")
            assert not list((stand.runs / "r").glob("evals/*"))

    go(body)


def test_several_samples_a_prompt_have_seeds_log_probs_and_their_own_metrics(tmp_path: Path) -> None:
    """And of two points of one run the second knows what it was asked, and what the first one was."""
    stand = Stand(tmp_path, sampling="n = 3, temperature = 0.7, logprob = true, max_new_tokens = 16")

    async def body() -> None:
        async with stand.running(2):
            await stand.until_ready()
            stand.put_run("r")
            first, second = await stand.until_ended(stand.dispatch("r", 1), stand.dispatch("r", 2))
            samples = stand.samples(first.id)
            assert [(s.prompt_index, s.sample_index) for s in samples] == [(i // 3, i % 3) for i in range(24)]
            assert len({s.seed for s in samples}) == len({s.output for s in samples}) == 24
            assert [s.seed for s in samples] == [s.seed for s in stand.samples(second.id)]
            assert all(s.logprob is not None and s.logprob < 0 for s in samples)
            assert {"pass@1", "pass@2", "pass@3", "pass^3", "avg@3", "unparsed"} <= set(first.metrics)
            assert (first.metrics["exact_match"].n, first.metrics["exact_match"].prompts) == (24, 8)
            assert (first.headline, second.suite_digest) == ("exact_match", first.suite_digest)
            assert (first.suite_digest is not None, first.alarms, second.alarms) == (True, (), ())

    go(body)


def test_a_point_none_of_whose_answers_ended_by_itself_says_so(tmp_path: Path) -> None:
    stand = Stand(tmp_path, sampling="max_new_tokens = 5")

    async def body() -> None:
        async with stand.running(1):
            await stand.until_ready()
            stand.put_run("r")
            [view] = await stand.until_ended(stand.dispatch("r", 1))
            assert [alarm.kind for alarm in view.alarms] == ["eos_never"]
            assert view.alarms[0].evidence == {"answered": 8, "output_tokens": 5}

    go(body)


def test_a_scorer_that_hangs_holds_up_its_own_point_and_no_other(stand: Stand) -> None:
    async def body() -> None:
        async with stand.running(1):
            await stand.until_ready()
            release = asyncio.Event()
            calls = 0

            async def first_hangs(outputs: Sequence[str]) -> list[Score]:
                nonlocal calls
                calls += 1
                if calls == 1:
                    await release.wait()
                return [Score(1.0) for _ in outputs]

            scoring(stand, first_hangs)
            stand.put_run("r")
            stuck = stand.dispatch("r", 1)
            await stand.until_state(stuck, PointState.SCORING)
            await stand.until_done(stand.dispatch("r", 2), stand.dispatch("r", 3))
            assert stand.point(stuck).state is PointState.SCORING
            release.set()
            await stand.until_done(stuck)

    go(body)


def test_a_scorer_pool_that_fails_costs_an_attempt_and_max_attempts_end_the_point(stand: Stand) -> None:
    async def broken(outputs: Sequence[str]) -> list[Score]:
        raise ScorerPoolFailed("no process could be started")

    async def body() -> None:
        async with stand.running(1):
            await stand.until_ready()
            scoring(stand, broken)
            stand.put_run("r")
            [view] = await stand.until_ended(stand.dispatch("r", 1))
            assert (view.state, view.reason) == (PointState.FAILED, Reason.MAX_ATTEMPTS)
            assert view.attempts == stand.config.service.max_attempts
            assert "no process could be started" in (view.detail or "")
            assert stand.engine("e0").point is None

    go(body)


def test_files_that_hide_from_an_engine_are_ckpt_missing_and_no_fault_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand(tmp_path, visibility_timeout_s=0.3)

    def hidden(directory: Path, manifest: Any) -> str | None:
        return "model.safetensors: No such file" if "step_1-" in directory.name else None

    monkeypatch.setattr("eval_service.engine.pin.first_missing", hidden)

    async def body() -> None:
        async with stand.running(1):
            stand.put_run("r")
            [view] = await stand.until_ended(stand.dispatch("r", 1))
            assert (view.state, view.reason) == (PointState.SKIPPED, Reason.CKPT_MISSING)
            await stand.until_done(stand.dispatch("r", 2))
            assert stand.engine("e0").report.restarts == 0

    go(body)


def test_what_a_dead_trainer_published_or_left_in_its_outbox_is_taken_in_and_evaluated(tmp_path: Path) -> None:
    stand = Stand(tmp_path, scan_interval_s=0.1)

    async def body() -> None:
        stand.put_run("r")
        exports = [stand.export("r", step) for step in (1, 2)]
        requests = [
            DispatchRequest(
                run="r", step=step, reservation=str(uuid.uuid4()), snapshot=str(e.path), digest=e.manifest.digest
            )
            for step, e in zip((1, 2), exports, strict=True)
        ]
        (exports[0].path / names.DISPATCH).write_text(json.dumps([requests[0].model_dump(mode="json")]))
        outbox = Outbox(names.outbox_dir(stand.runs, "r"))
        outbox.put(requests[1])
        async with stand.running(1):
            await stand.until(lambda: stand.views.points(run="r").total == 2)
            await stand.until_done(*[point.id for point in stand.views.points(run="r").points])
            await stand.until(lambda: not outbox.files())

    go(body)


def test_snapshots_that_nobody_needs_go_and_none_that_is_in_use_does(stand: Stand) -> None:
    async def body() -> None:
        async with stand.running(1):
            await stand.until_ready()
            stand.put_run("r", keep=1)
            await stand.until_done(*[stand.dispatch("r", step) for step in range(4)])
            stand.hold_scoring()
            held = stand.export("r", 4)
            point = stand.dispatch("r", 4, held)
            await stand.until_state(point, PointState.SCORING)
            stand.acting._housekeeping.something_settled()
            await stand.until(lambda: sum(path.name.startswith("step_") for path in (stand.runs / "r").iterdir()) <= 3)
            assert held.path.is_dir()
            stand.release_scoring()
            await stand.until_done(point)

    go(body)


def test_a_snapshot_that_vanishes_while_it_waits_ends_its_point_and_leaves_the_fleet_well(tmp_path: Path) -> None:
    stand = Stand(tmp_path, visibility_timeout_s=0.3)

    async def body() -> None:
        async with stand.running(0):
            stand.put_run("r")
            gone = stand.export("r", 1)
            point = stand.dispatch("r", 1, gone)
            await stand.until(lambda: stand.acting._moves.runnable())  # noqa: PLW0108 - nobody may act yet
            shutil.rmtree(gone.path)
            stand.start_engine("e0")
            [view] = await stand.until_ended(point)
            assert (view.state, view.reason) == (PointState.SKIPPED, Reason.CKPT_MISSING)
            await stand.until_done(stand.dispatch("r", 2))

    go(body)


def test_whatever_ends_a_point_its_snapshot_goes_at_once_and_not_with_the_next_scan(stand: Stand) -> None:
    """Checks that it does not pass, a drain's deadline, and its own with no engine there; the scan is an hour away."""

    async def body() -> None:
        async with stand.running(0):
            await stand.until(lambda: stand.acting)
            stand.put_run("r", keep=0)

            async def gone(step: int, ends: Callable[[], object], **export: Any) -> PointView:
                exported = stand.export("r", step, **export)
                point = stand.dispatch("r", step, exported)
                waiting = len(export) == 0
                await stand.until(lambda: not waiting or point in {p.id for p in stand.acting._moves.runnable()})
                ends()
                [view] = await stand.until_ended(point)
                await stand.until(lambda: not exported.path.exists())
                return view

            def abort() -> None:
                asked = DrainRequest(run="r", planned=(), timeout_s=5, on_timeout=OnTimeout.ABORT)
                stand.intents.begin_drain(asked)
                stand.clock.ahead_s += 6

            def late() -> None:
                stand.clock.ahead_s += stand.config.service.point_timeout_s + 1

            ends = [
                await gone(1, lambda: None, without=("model.norm.weight",)),
                await gone(2, abort),
                await gone(3, late),
            ]
            assert [view.reason for view in ends] == [Reason.SNAPSHOT_INVALID, Reason.DRAIN_TIMEOUT, Reason.UNHEALTHY]

    go(body)
