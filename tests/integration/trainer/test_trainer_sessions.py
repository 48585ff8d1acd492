"""A process may train one model after another, as a notebook and these tests do."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from trainer.architecture import read_architecture
from trainer.background import Background
from trainer.config import ParallelSection, TrainSection
from trainer.data import load_dataset
from trainer.parallel import parallel_session
from trainer.training import build_training

pytestmark = pytest.mark.real


def test_a_session_that_has_ended_holds_no_model_and_so_none_of_its_groups_threads(
    tiny_model_dir: Path, chats: Path
) -> None:
    """Megatron's hooks hold the model from autograd's side, where Python's collector does not look."""
    section = TrainSection(num_steps=1, global_batch_size=4, micro_batch_size=2)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    dataset = load_dataset(chats, tokenizer, max_length=64, seed=0, global_batch_size=4)
    with parallel_session(ParallelSection(), seed=0, threads=1) as ranks:
        training = build_training(read_architecture(tiny_model_dir), tiny_model_dir, section, ranks)
        training.step(1, dataset)
        left = weakref.ref(training.model.ddp)
    del training, ranks
    gc.collect()
    assert left() is None


def test_an_export_that_has_ended_holds_nothing_until_the_next() -> None:
    class Weights:
        pass

    weights, background = Weights(), Background()
    left = weakref.ref(weights)
    assert background.acquire(1.0)
    background.submit(lambda held=weights: None)  # type: ignore[misc]
    assert background.acquire(60.0), "it has ended, and given the buffer back"
    del weights
    try:
        for _ in range(1000):  # the thread may be between giving the buffer back and waiting for the next job
            if left() is None:
                break
            background.join(0.01)
            gc.collect()
        assert left() is None
    finally:
        background.close(5.0)
