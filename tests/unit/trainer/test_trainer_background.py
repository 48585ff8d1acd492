"""What is written behind training: one job's failure is its own, and the next finds the thread at work."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from trainer.background import Background
from trainer.checkpoint import LAST_FILE, CheckpointStore


def test_a_job_that_raises_costs_nobody_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    """It would be waited for in vain, for as long as a save may take: half an hour, once a save."""

    def fails() -> None:
        raise OSError("the storage is away")

    background, done = Background(), list[int]()
    for job in (fails, lambda: done.append(1)):
        assert background.acquire(30.0), "it has given the buffer back"
        background.submit(job)
        assert background.join(30.0)
    assert done == [1]
    assert [record.exc_text for record in caplog.records if "the storage is away" in (record.exc_text or "")]
    background.close(30.0)


def test_a_checkpoint_that_somebody_deletes_as_it_is_to_go_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, "r", keep=1)
    for step in (1, 2, 3):
        store.path(step).mkdir()
        (store.path(step) / LAST_FILE).touch()
    rename = Path.rename

    def gone_before(path: Path, target: Path) -> Path:
        if path == store.path(1):
            shutil.rmtree(path)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", gone_before)
    assert store.rotate() == [2]
    assert store.steps() == [3]
