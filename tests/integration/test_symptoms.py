"""What people hit in the field, by its symptom, against a real controller over a real ledger with fake engines."""

from __future__ import annotations

import asyncio
import errno
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from eval_service.contract import names
from eval_service.contract.manifest import Manifest
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import DrainRequest, PlannedPoint, Receipt, SampleView
from eval_service.gateway.app import build_app
from eval_service.gateway.services import Services
from eval_service.ledger.bounds import Bounds
from eval_service.suites.samples import write_samples
from tests.support.bounded import go
from tests.support.controller_stand import SUITE, Stand
from tests.support.engine_model import make_model
from tests.support.lost_samples import killed_once_written


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    return Stand(tmp_path)


@asynccontextmanager
async def gateway(stand: Stand) -> AsyncIterator[str]:
    """The API over the stand's ledger, on a port of its own."""

    def wake() -> None:
        if stand.link.controller is not None:
            loop.call_soon_threadsafe(stand.link.controller.wake)

    loop = asyncio.get_running_loop()
    bounds = Bounds((stand.root.resolve(),), stand.suites.keys())
    app = build_app(Services(stand.database, bounds, "test", wake, stand.config.groups))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        task = asyncio.create_task(server.serve(sockets=[listening]))
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        await task


def receipt(stand: Stand, drain: str) -> Receipt:
    stand.intents.end_drain(drain)
    return stand.views.receipt(drain)


def plan(steps: Sequence[int]) -> tuple[PlannedPoint, ...]:
    return tuple(PlannedPoint(step=step, suite=SUITE) for step in steps)


# --- before an engine is touched


def test_a_watcher_that_does_not_check_the_marker_one_of_two_shards_is_skipped_and_no_engine_touched(
    tmp_path: Path,
) -> None:
    async def body() -> None:
        async with Stand(tmp_path, visibility_timeout_s=0.2).running(1) as stand:
            await stand.until_ready()
            stand.put_run("r")
            export = stand.export("r", 1)
            (export.path / names.COMPLETE).unlink()
            (export.path / "model.safetensors").rename(export.path / "model-00001-of-00002.safetensors")
            [view] = await stand.until_ended(stand.dispatch("r", 1, export))
            assert (view.state, view.reason, view.attempts) == (PointState.SKIPPED, Reason.CKPT_MISSING, 0)
            assert stand.engine("e0").pinned is None

    go(body)


def test_nfs_attribute_caches_that_hide_new_files_for_30_s_are_waited_for_and_are_no_missing_checkpoint(
    stand: Stand,
) -> None:
    async def body() -> None:
        async with stand.running(1):
            stand.put_run("r")
            export = stand.export("r", 1)
            hidden = export.path.rename(stand.root / "hidden")
            point = stand.dispatch("r", 1, export)
            await stand.until(lambda: stand.acting._admissions._not_before)
            stand.clock.ahead_s += 30
            await asyncio.sleep(1.1)  # one more look at nothing
            assert stand.point(point).state is PointState.QUEUED
            hidden.rename(export.path)
            await stand.until_done(point)

    go(body)


def test_a_bad_manifest_in_the_ledger_ends_its_point_and_keeps_no_other_from_its_engine(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with stand.running(0):
            stand.put_run("r")
            bad, good = stand.dispatch("r", 1), stand.dispatch("r", 2)
            await stand.until(lambda: len(stand.acting._moves.runnable()) == 2)
            real = stand.acting._moves.manifest
            spoiled = next(point.snapshot_id for point in stand.acting._moves.runnable() if point.id == bad)

            def manifest(snapshot: str) -> Manifest:
                return Manifest.model_validate_json("{") if snapshot == spoiled else real(snapshot)

            monkeypatch.setattr(stand.acting._moves, "manifest", manifest)
            stand.start_engine("e0")
            await stand.until_done(good)
            [view] = await stand.until_ended(bad)
            assert (view.state, view.reason) == (PointState.SKIPPED, Reason.SNAPSHOT_INVALID)
            assert stand.link.controller is not None
            assert stand.link.controller.healthy()

    go(body)


# --- what is not ours to keep


def is_held(run: Path, place: Path) -> bool:
    """Whether all of a checkpoint's files are linked, and not just the first of them."""
    files = list(place.iterdir())
    return any(
        all((held / file.name).exists() and (held / file.name).samefile(file) for file in files)
        for held in run.glob(".held-*")
    )


def checkpoint(stand: Stand, run: str, step: int, source: str) -> Path:
    """A checkpoint of a trainer that rotates: our own `save_hf`'s has marker and manifest, a caller's has neither."""
    place = stand.root / "checkpoints" / f"iter_{step}"
    place.parent.mkdir(exist_ok=True)
    if source == "caller":
        return make_model(place, seed=step).path
    return stand.export(run, step).path.rename(place)


@pytest.mark.parametrize("source", ["reuse", "caller"])
def test_a_trainer_that_rotates_its_checkpoints_away_loses_no_point_and_gets_its_disk_back(
    stand: Stand, source: str
) -> None:
    async def body() -> None:
        async with stand.running(0):
            stand.put_run("r")
            points, held = [], stand.runs / "r"
            for step in range(1, 4):
                place = checkpoint(stand, "r", step, source)
                points.append(stand.dispatch_path("r", step, place, source=source))
                await stand.until(partial(is_held, held, place))
                shutil.rmtree(place)
            stand.start_engine("e0")
            views = await stand.until_ended(*points)
            assert [view.state for view in views] == [PointState.DONE] * 3, [view.detail for view in views]
            await stand.until(lambda: not list(held.glob(".held-*")))

    go(body)


def test_where_hard_links_can_not_be_had_a_checkpoint_that_vanishes_is_missing_and_why_is_said(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr("eval_service.admission.links.os.link", refused)

    async def body() -> None:
        async with stand.running(0):
            stand.put_run("r")
            place = checkpoint(stand, "r", 1, "caller")
            point = stand.dispatch_path("r", 1, place, source="caller")
            await stand.until(lambda: len(stand.acting._moves.runnable()) == 1)
            shutil.rmtree(place)
            hurried = stand.acting._service.model_copy(update={"visibility_timeout_s": 0.2})
            stand.acting._pins = replace(stand.acting._pins, service=hurried)
            stand.start_engine("e0")
            [view] = await stand.until_ended(point)
            assert (view.state, view.reason) == (PointState.SKIPPED, Reason.CKPT_MISSING)
            assert "hard links" in (view.detail or "")

    go(body)


# --- coverage, retention, disks


def test_an_eval_before_the_upload_ended_or_a_checkpoint_never_evaluated_is_a_named_gap_until_it_comes(
    stand: Stand,
) -> None:
    async def body() -> None:
        async with stand.running(1):
            stand.put_run("r")
            steps = range(1, 11)
            points = [stand.dispatch("r", step) for step in steps if step != 3]
            await stand.until_done(*points)
            asked = DrainRequest(run="r", planned=plan(steps), timeout_s=5)
            first = receipt(stand, stand.intents.begin_drain(asked))
            assert (len(first.done), [gap.step for gap in first.never_came]) == (9, [3])
            await stand.until_done(stand.dispatch("r", 3))
            second = receipt(stand, stand.intents.begin_drain(asked))
            assert (len(second.done), second.never_came) == (10, ())

    go(body)


def test_retention_that_outruns_a_slow_evaluator_deletes_nothing_that_is_due_and_bounds_the_disk(stand: Stand) -> None:
    async def body() -> None:
        async with stand.running(1):
            await stand.until_ready()
            stand.put_run("r", keep=1)
            stand.hold_scoring()
            points = [stand.dispatch("r", step) for step in range(1, 7)]
            await stand.until(lambda: stand.point(points[0]).state is PointState.SCORING)
            assert len(list((stand.runs / "r").glob("step_*"))) == 6
            stand.release_scoring()
            await stand.until_done(*points)
            # The last one, the best, and what the engine holds.
            await stand.until(lambda: len(list((stand.runs / "r").glob("step_*"))) <= 3)

    go(body)


def test_a_full_disk_on_the_services_side_costs_an_attempt_and_no_result(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Path] = []

    def full(path: Path, samples: Iterable[SampleView], **more: Any) -> int:
        tries.append(path)
        if len(tries) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_samples(path, samples, **more)

    monkeypatch.setattr("eval_service.controller.recording.write_samples", full)

    async def body() -> None:
        async with stand.running(1):
            stand.put_run("r")
            [view] = await stand.until_done(stand.dispatch("r", 1))
            assert view.attempts == 2
            assert "No space left" in (view.history[0].detail or "")

    go(body)


def test_samples_that_the_ledger_never_knew_of_go_with_the_next_attempts(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that is killed between the file and the ledger leaves the file."""
    written: list[Path] = []
    monkeypatch.setattr("eval_service.controller.recording.write_samples", killed_once_written(written))

    async def body() -> None:
        async with stand.running(1):
            stand.put_run("r")
            [view] = await stand.until_done(stand.dispatch("r", 1))
            assert [path for path in written if path.exists()] == [written[1]]
            assert view.attempts == 2

    go(body)


# --- shutdowns, stuck scorers, retries


def test_a_scale_down_or_a_redeploy_in_mid_eval_severs_requests_and_the_point_completes_once(tmp_path: Path) -> None:
    async def body() -> None:
        async with Stand(tmp_path, prompts=40).running(2) as stand:
            await stand.until_ready()
            stand.put_run("r")
            stand.hold_answers("e0", "e1")
            point = stand.dispatch("r", 1)
            await stand.until(lambda: len(stand.lane(point).proven) == 2)
            stand.runners["e0"].leave()
            await stand.until(lambda: stand.engine("e0").point is None)
            assert stand.link.controller is not None
            stand.link.controller.stop()
            await stand._running
            stand.release()
            stand.start_controller()
            [view] = await stand.until_done(point)
            assert [attempt.outcome for attempt in view.history] == ["controller_lost", "done"]

    go(body)


def test_a_shutdown_that_would_wait_for_ever_on_one_stuck_validation_gets_a_list_at_its_deadline(stand: Stand) -> None:
    async def body() -> None:
        async with stand.running(1):
            await stand.until_ready()
            stand.put_run("r")
            stand.hold_scoring()
            stuck = stand.dispatch("r", 1)
            await stand.until(lambda: stand.point(stuck).state is PointState.SCORING)
            drain = stand.intents.begin_drain(DrainRequest(run="r", planned=plan([1, 2]), timeout_s=20))
            stand.clock.ahead_s += 21
            told = receipt(stand, drain)
            assert (told.open, told.drained, [line.point for line in told.pending]) == (False, False, [stuck])
            assert [gap.step for gap in told.never_came] == [2]

    go(body)


def test_a_drain_by_the_command_line_of_one_stuck_scorer_ends_at_its_deadline_with_a_list_and_another_exit_code(
    stand: Stand,
) -> None:
    async def body() -> None:
        async with stand.running(1), gateway(stand) as url:
            await stand.until_ready()
            stand.put_run("r")
            stand.hold_scoring()
            stuck = stand.dispatch("r", 1)
            await stand.until(lambda: stand.point(stuck).state is PointState.SCORING)
            command = [sys.executable, "-m", "eval_service.cli.main", "drain", "r", "--url", url, "--timeout", "2"]
            asked = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            told, _ = await asked.communicate()
            assert asked.returncode == 3
            assert "time is up" in told.decode()
            assert "step 1 words: pending" in told.decode()
            stand.release_scoring()
            await stand.until_done(stuck)
            again = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
            assert await again.wait() == 0

    go(body)


def test_a_failed_checkpoint_is_not_marked_done_and_is_tried_again_first_503_then_well(tmp_path: Path) -> None:
    async def body() -> None:
        async with Stand(tmp_path, prompts=40, server_concurrency=1).running(3) as stand:
            await stand.until_ready()
            stand.put_run("r")
            stand.hold_answers(*stand.runners)
            point = stand.dispatch("r", 1)
            await stand.until(lambda: len(stand.lane(point).proven) == 3)
            await asyncio.gather(*(stand.turn(name, unavailable=True) for name in stand.runners))
            stand.release()
            [view] = await stand.until_done(point)
            assert [attempt.outcome for attempt in view.history] == ["generation", "done"]
            assert (view.state, view.attempts) == (PointState.DONE, 2)

    go(body)
