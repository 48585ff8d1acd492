"""The kit's snapshots are what they are meant to be: admission takes sound and poisoned ones, and refuses the bad."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval_service.admission.checks import find_faults
from eval_service.admission.faults import FaultCode
from eval_service.chaos.snapshots import BAD, VOCAB, Flaw, canary_of, flip_byte, make_model, write_base
from eval_service.contract.canary import canary_token_ids
from eval_service.contract.manifest import tensors_digest
from eval_service.contract.snapshot import Published, SnapshotWriter
from eval_service.contract.wire import Source
from eval_service.engine.fake import fake_logprobs, read_weights

PROMPTS = {f"{number}?": str(number) for number in range(8)}


def publish(root: Path, seed: str, flaw: Flaw | None = None) -> Published:
    """Publish a model as the simulated trainer does."""
    model = make_model(seed, PROMPTS, flaw=flaw)
    with SnapshotWriter(root, "r", 3, "tests") as writer:
        for name, tensors in model.shards():
            writer.add_weights(name, tensors)
        for name, data in model.files().items():
            writer.add_bytes(name, data)
        published = writer.publish(canary=canary_of(tensors_digest(writer.tensors), flaw), dispatch=[])
    if flaw is Flaw.FLIPPED_BYTE:
        flip_byte(published.path)
    return published


def faults_of(published: Published) -> list[FaultCode]:
    report = find_faults(published.path, source=Source.STAGING, run="r", step=3)
    return [fault.code for fault in report.faults]


@pytest.mark.parametrize("flaw", [None, Flaw.POISONED])
def test_admission_takes_what_only_a_pin_can_refuse(tmp_path: Path, flaw: Flaw | None) -> None:
    assert faults_of(publish(tmp_path, "a", flaw)) == []


@pytest.mark.parametrize("flaw", BAD)
def test_admission_refuses_every_bad_one_as_invalid(tmp_path: Path, flaw: Flaw) -> None:
    assert FaultCode.INVALID in faults_of(publish(tmp_path, "a", flaw))


def test_a_fake_reproduces_the_canary_of_a_sound_one_and_not_that_of_a_poisoned_one(tmp_path: Path) -> None:
    for flaw, reproduced in ((None, True), (Flaw.POISONED, False)):
        published = publish(tmp_path / str(flaw), "a", flaw)
        held = read_weights(published.path)
        canary = published.manifest.canary
        assert canary is not None
        assert (canary.logprobs[0] == fake_logprobs(held.tensor_digest, canary.token_ids[0])) is reproduced


def test_seeds_differ_in_bytes_and_in_what_they_know_and_one_seed_does_not(tmp_path: Path) -> None:
    first, second = make_model("1", PROMPTS), make_model("1", PROMPTS)
    assert first.answers == second.answers
    digests = {publish(tmp_path / str(number), str(number)).manifest.digest for number in range(6)}
    assert len(digests) == 6
    assert len({len(make_model(str(number), PROMPTS).answers) for number in range(30)}) > 3


def test_the_base_model_is_one_that_a_fake_boots_with(tmp_path: Path) -> None:
    write_base(tmp_path / "model")
    assert read_weights(tmp_path / "model").answers == {}
    assert max(max(row) for row in canary_token_ids(VOCAB)) < VOCAB
