"""What the integration tests of the trainer share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stub_service import StubService, serving
from tests.support.tiny_model import build_tiny_model, write_chats
from tests.support.trainer_process import TrainerRuns
from tests.support.zygote import Zygote


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with tied embeddings, made once."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty conversations."""
    return write_chats(tmp_path_factory.mktemp("chats") / "train.jsonl", 40)


@pytest.fixture
def stub() -> Iterator[StubService]:
    """A service that takes points in and never runs one."""
    with serving(StubService()) as service:
        yield service


@pytest.fixture
def runs(trainer_zygote: Zygote, tmp_path: Path, tiny_model_dir: Path, chats: Path, stub: StubService) -> TrainerRuns:
    """The trainer, as a process, against the stub; 4 steps, points every 2."""
    return TrainerRuns(trainer_zygote, tmp_path, tiny_model_dir, chats, stub.url)
