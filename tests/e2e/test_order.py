"""The order of things on the real trainer process and the real service: from its step log and the ledger."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import uuid
from pathlib import Path

import pytest

from eval_service.contract import names
from eval_service.contract.manifest import Manifest, read_manifest
from eval_service.contract.states import PinProof, PointState, Reason
from eval_service.contract.wire import DispatchRequest, Kind, RunSpec, Source
from tests.support.live import DONE, SUITE, Live, Training, wait_for

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

ORDER = ("step_begin", "step_end", "eval_dispatched", "save", "drain_begin", "drain_end", "teardown")


def _steps(live: Live, run: str) -> list[tuple[int, PointState]]:
    return [(point.step, point.state) for point in live.points(run)]


def _before(order: list[tuple[str, int | None]], first: tuple[str, int | None], then: tuple[str, int | None]) -> bool:
    return order.index(first) < order.index(then)


def test_a_fresh_run_evaluates_step_0_before_its_first_step_and_forces_the_last_after_its_save(live: Live) -> None:
    training = Training(live, "fresh", {"train": {"num_steps": 3}})
    training.train()
    order = list(training.events(*ORDER))
    assert order[0] == ("eval_dispatched", 0)
    assert _before(order, ("save", 3), ("eval_dispatched", 3))
    assert [event for event, _ in order[-3:]] == ["drain_begin", "drain_end", "teardown"]
    assert _steps(live, "fresh") == [(0, DONE), (2, DONE), (3, DONE)]
    base, _, final = live.points("fresh")
    assert (base.source, base.snapshot) == (Source.CALLER, str(live.model))
    assert (final.kind, final.force) == (Kind.FINAL, True)


def test_a_resumed_run_evaluates_the_step_it_resumed_from_as_it_was_loaded_also_with_interval_1(live: Live) -> None:
    """Killed when step 2 was saved and step 3 already exported; it resumes from 2, so step 2's own weights count."""
    training = Training(live, "resumed", {"train": {"save_interval": 2, "num_steps": 4}, "eval": {"interval": 1}})
    training.settings["eval"] |= {"keep": 10}
    training.train("settled:4", code=-signal.SIGKILL)
    cut = len(training.log())
    saved = _manifests(live, "resumed")
    training.train()

    second = [(line["event"], line.get("step")) for line in training.log()[cut:]]
    first_step = next(index for index, (event, _) in enumerate(second) if event == "step_begin")
    assert second[first_step] == ("step_begin", 3)
    assert any(step == 2 and event in ("eval_known", "eval_dispatched") for event, step in second[:first_step])
    assert not any(step == 3 for _, step in second[:first_step])
    assert [step for step, _ in _steps(live, "resumed")] == [0, 1, 2, 3, 4]
    assert {state for _, state in _steps(live, "resumed")} == {DONE}
    after = _manifests(live, "resumed")
    assert after[2].digest == saved[2].digest, "the weights as loaded are those that were saved"
    assert after[2].canary == saved[2].canary
    assert after[2].canary != after[3].canary


def test_a_resumed_run_exports_the_weights_as_loaded_where_its_step_was_never_evaluated(live: Live) -> None:
    training = Training(live, "unseen", {"train": {"save_interval": 1}, "eval": {"keep": 10}})
    training.train("after_save:1", code=-signal.SIGKILL)
    cut = len(training.log())
    training.train()
    second = [(line["event"], line.get("step")) for line in training.log()[cut:] if line["event"] in ORDER]
    assert second[0] == ("eval_dispatched", 1)
    assert second[1] == ("step_begin", 2)
    point = live.points("unseen", step=1)[0]
    assert (point.state, point.pin_proof) == (DONE, PinProof.CANARY)
    assert _steps(live, "unseen") == [(0, DONE), (1, DONE), (2, DONE), (4, DONE)]


def test_an_eval_only_run_evaluates_the_base_model_once_and_ends(live: Live) -> None:
    training = Training(live, "only", {"train": {"num_steps": 0}})
    training.train()
    assert _steps(live, "only") == [(0, DONE)]
    assert list(training.events("step_begin")) == []


def test_killed_between_the_last_save_and_its_reservation_resuming_evaluates_that_final_point_once(live: Live) -> None:
    training = Training(live, "lacking")
    training.train("after_save:4", code=-signal.SIGKILL)
    assert 4 not in [point.step for point in live.points("lacking")]
    cut = len(training.log())
    for _ in range(2):  # and resuming once more evaluates nothing
        training.train()
    assert all(line["event"] != "step_begin" for line in training.log()[cut:]), "a finished run trains nothing"
    assert _steps(live, "lacking") == [(0, DONE), (2, DONE), (4, DONE)]
    assert len(live.client.points(run="lacking", step=4).points) == 1


def test_skip_eval_before_train_skips_step_0_and_nothing_else(live: Live) -> None:
    training = Training(live, "skips", {"eval": {"skip_eval_before_train": True}})
    training.train()
    assert _steps(live, "skips") == [(2, DONE), (4, DONE)]


@pytest.mark.parametrize(("how", "codes"), [("raise", {1}), ("term", {143, -signal.SIGTERM, 0, 1})])
def test_drain_comes_before_teardown_also_after_an_exception_and_sigterm(live: Live, how: str, codes: set[int]) -> None:
    training = Training(live, f"cut-{how}", {"train": {"num_steps": 50}})
    assert training.train(f"in_step:4:{how}", code=None) in codes
    order = list(training.events("drain_begin", "drain_end", "teardown"))
    assert [event for event, _ in order] == ["drain_begin", "drain_end", "teardown"]
    receipt = json.loads((training.output / "out" / names.RECEIPT).read_text())
    assert receipt["drained"]
    assert {(point.step, point.state) for point in live.points(f"cut-{how}")} >= {(0, DONE), (2, DONE)}


def test_a_point_whose_export_failed_is_recorded_and_training_goes_on(live: Live) -> None:
    training = Training(live, "full")
    training.train("in_export:2:raise")
    points = live.ended("full", 3)
    assert [(point.step, point.state, point.reason) for point in points] == [
        (0, DONE, None),
        (2, PointState.SKIPPED, Reason.EXPORT_FAILED),
        (4, DONE, None),
    ]
    assert not list((live.root / "full").glob(".partial-*"))


def test_reuse_evaluates_own_checkpoints_and_gc_leaves_them(live: Live) -> None:
    saves = str(live.root / "checkpoints")
    training = Training(live, "reuse", {"train": {"save_interval": 2, "save_hf": True, "save_dir": saves}})
    training.settings["eval"] = {"snapshot_source": "reuse", "keep": 0}
    training.train()
    points = live.points("reuse")
    assert [point.detail for point in points] == [None, None, None]
    assert [(point.step, point.state) for point in points] == [(0, DONE), (2, DONE), (4, DONE)]
    assert [point.source for point in points[1:]] == [Source.REUSE, Source.REUSE]
    for point in points:
        assert point.snapshot is not None
        assert Path(point.snapshot).is_dir(), "nobody deletes a save_hf checkpoint or a caller's directory"


def test_an_own_checkpoint_without_its_marker_is_missing_and_a_callers_directory_needs_none(live: Live) -> None:
    live.client.put_run("marks", RunSpec(root=str(live.root), suites=(SUITE,)))
    unmarked = live.root / "unmarked"
    shutil.copytree(live.model, unmarked)
    for step, source in ((1, Source.REUSE), (2, Source.CALLER)):
        live.client.dispatch(
            DispatchRequest(
                run="marks", step=step, source=source, snapshot=str(unmarked), reservation=str(uuid.uuid4())
            )
        )
    own, caller = live.ended("marks", 2)
    assert (own.state, own.reason) == (PointState.SKIPPED, Reason.CKPT_MISSING)
    assert caller.state is DONE
    assert unmarked.is_dir()


def test_a_trainer_killed_between_publishing_and_posting_has_its_point_taken_in_by_the_scan(live: Live) -> None:
    training = Training(live, "scanned")
    training.train("after_publish:2", code=-signal.SIGKILL)
    points = live.ended("scanned", 2)
    assert [(point.step, point.state) for point in points] == [(0, DONE), (2, DONE)]


def test_with_the_service_away_training_goes_on_and_the_outbox_keeps_what_the_scan_takes_in(live: Live) -> None:
    with socket.socket() as nobody:  # holds the port, and does not listen
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        training = Training(live, "away", {"train": {"num_steps": 6}, "eval": {"url": url, "max_in_flight": 3}})
        training.settings["eval"] |= {"drain_timeout_s": 1.0, "reserve_timeout_s": 1.0}
        training.train("settled:5:raise", code=1)  # all is in the outbox by then, and the drain waits for no export
    receipt = json.loads((live.root / "away" / names.OUTBOX / names.RECEIPT).read_text())
    assert not receipt["drained"]
    assert {line["step"] for line in receipt["deferred"]} == {0, 2, 4}
    live.client.put_run("away", RunSpec(root=str(live.root), suites=(SUITE,)))
    points = live.ended("away", 3)
    assert [(point.step, point.state) for point in points] == [(0, DONE), (2, DONE), (4, DONE)]
    outbox = live.root / "away" / names.OUTBOX
    wait_for(lambda: [path.name for path in outbox.glob("*.json")] == [names.RECEIPT], "the outbox to be emptied")


def _manifests(live: Live, run: str) -> dict[int, Manifest]:
    found = [read_manifest(path) for path in (live.root / run).glob("step_*")]
    return {manifest.step: manifest for manifest in found}
