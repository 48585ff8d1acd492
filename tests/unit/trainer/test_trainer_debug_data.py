"""Dumped batches: what was trained on is trained on again, and what can't be is refused before training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval_service.contract.errors import ConfigError
from trainer.data import Dataset, Example
from trainer.debug_data import Dumping, load_dumped, path_of

PAIR = {"token_ids": [1, 2], "learn": [0, 1]}
BAD_STARTS: tuple[list[int], ...] = ([], [1], [0, 0], [0, 2], [0, -1])
EXAMPLES = [Example((number, number + 1), (False, True)) for number in range(6)]


@pytest.fixture
def batches() -> Dataset:
    return Dataset(EXAMPLES, seed=3, global_batch_size=2)


@pytest.fixture
def dumped(batches: Dataset, tmp_path: Path) -> Path:
    """Steps 1 to 4."""
    dumping = Dumping(batches, tmp_path / "dumped")
    for step in range(1, 5):
        assert dumping.of_step(step) == dumping.of_step(step) == batches.of_step(step)
    return tmp_path / "dumped"


def test_what_was_dumped_comes_back_step_by_step_over_an_epochs_end(dumped: Path, batches: Dataset) -> None:
    loaded = load_dumped(dumped, 2, 4, global_batch_size=2, vocab_size=10)
    assert [loaded.of_step(step) for step in (2, 3, 4)] == [batches.of_step(step) for step in (2, 3, 4)]
    assert loaded.steps_per_epoch is None
    assert sorted(path.name for path in dumped.iterdir()) == [f"step_{step}.json" for step in range(1, 5)]


@pytest.mark.parametrize(
    ("last", "size", "vocab", "text", "said"),
    [
        (5, 2, 10, None, "step_5.json can't be read"),
        (4, 3, 10, None, "holds 2 conversations"),
        (4, 2, 3, None, "token ids that the model doesn't have"),
        (4, 2, 10, "{", "no dumped batch"),
        (4, 2, 10, '{"examples": [{}, {}]}', "no dumped batch"),
        (4, 2, 10, '{"examples": [{"token_ids": [1], "learn": [1]}, {"token_ids": [1], "learn": [1]}]}', "differ"),
        *((4, 2, 10, json.dumps({"examples": [{**PAIR, "starts": starts}] * 2}), "differ") for starts in BAD_STARTS),
    ],
)
def test_batches_that_do_not_fit_the_run_are_refused_by_name(
    dumped: Path, last: int, size: int, vocab: int, text: str | None, said: str
) -> None:
    if text is not None:
        path_of(dumped, 4).write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_dumped(dumped, 1, last, global_batch_size=size, vocab_size=vocab)
    assert caught.value.field == "data.load_debug_data"
    assert caught.value.hint


def test_a_batch_that_cannot_be_dumped_is_told_and_training_goes_on(
    batches: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert Dumping(batches, tmp_path / "file").of_step(1) == batches.of_step(1)
    assert "step 1 was not dumped" in capsys.readouterr().err
