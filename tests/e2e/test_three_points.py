"""The whole path: the real trainer, the real service, two real engines, three points."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from eval_service.contract.states import PinProof
from eval_service.contract.wire import Kind
from tests.support.live import DONE, PROMPTS, Live, Training, wait_for

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def test_a_run_of_few_steps_has_exactly_three_points_done_on_the_pinned_weights(live: Live) -> None:
    training = Training(live, "three", {"eval": {"keep": 1}})
    training.train()

    points = live.points("three")
    assert [(point.step, point.kind, point.state) for point in points] == [
        (0, Kind.BASELINE, DONE),
        (2, Kind.PERIODIC, DONE),
        (4, Kind.FINAL, DONE),
    ]
    for point in points:
        samples = live.samples(point.id)
        assert len(samples) == PROMPTS
        assert {sample.weight_version for sample in samples} == {point.weight_version}
        assert point.weight_version is not None
        assert point.weight_version.startswith(f"{(point.digest or '')[:8]}.")
    base, *exported = [point.pin_proof for point in points]
    # A directory without a canary is proven by engines that agree; one engine alone may have been enough for the point.
    assert base in (PinProof.AGREEMENT, PinProof.UNPROVEN)
    assert exported == [PinProof.CANARY, PinProof.CANARY]
    assert len({point.weight_version for point in points}) == 3
    assert points[-1].force
    receipt = json.loads((training.output / "out" / "receipt.json").read_text())
    assert receipt["drained"]
    assert len(receipt["done"]) == 3
    digests = {point.step: point.digest for point in points}

    def is_kept() -> bool:
        """What an engine still holds the weights of stays, too: the last point may have taken one engine of two."""
        held = {engine.snapshot for group in live.client.fleet().groups for engine in group.engines}
        return [step for step in live.snapshots("three") if step == 4 or digests[step] not in held] == [4]

    wait_for(is_kept, "what is left to be `keep`")
    # What is deleted is renamed first, and the last of it may still be going.
    wait_for(lambda: not list((live.root / "three").glob(".*")), "no half-written or half-deleted directory to be left")


def test_the_check_command_exits_0_only_for_what_is_there(live: Live) -> None:
    training = Training(live, "checked")
    training.train()

    def check(*demands: str) -> int:
        command = [sys.executable, "-m", "eval_service.cli.main", "check", "checked", "--url", live.url, *demands]
        return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode

    right = ("--metric", "exact_match", "--threshold", "0.0", "--expect-points", "3")
    assert check(*right) == 0
    assert check(*right[:-1], "2") == 1, "one more than expected"
    assert check(*right[:-1], "4") == 1, "one fewer than expected"
    assert check("--metric", "f1", *right[2:]) == 1, "no such metric"
    assert check(*right[:3], "1.1", *right[4:]) == 1, "too low"
