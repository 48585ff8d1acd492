"""Scratch directories: whose user has died is collected, and nothing else ever."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eval_service.scratch import Kind, Scratch, collect, scratch

_USER = "from eval_service.scratch import Kind, Scratch\nprint(Scratch.make(Kind.RAY).path, flush=True)\ninput()\n"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_what_a_killed_process_leaves_is_collected_and_not_before(place: Path) -> None:
    command, env = [sys.executable, "-c", _USER], {**os.environ, "TMPDIR": str(place)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        left = Path(os.fsdecode(user.stdout.readline().strip()))
        (left / "session").mkdir()
        collect()
        assert left.is_dir(), "its user lives"
        user.kill()
    assert left.is_dir()
    collect()
    assert not left.exists()


def test_what_is_held_or_young_or_nobodys_stays(place: Path) -> None:
    held, dropped = Scratch.make(Kind.ENGINE), Scratch.make(Kind.ENGINE)
    os.close(dropped.lock)
    young, empty, theirs = (place / f"{Kind.CHAOS_TEMP}{name}" for name in ("young", "empty", "theirs"))
    for path in (young, empty, theirs):
        path.mkdir()
    (theirs / "work").touch()
    for path in (empty, theirs):
        os.utime(path, (time.time() - 3600,) * 2)
    collect()
    assert sorted(place.iterdir()) == sorted([held.path, young, theirs])
    held.remove()
    assert not held.path.exists()


def test_what_is_being_made_is_not_collected(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process collects at the very moment between the lock's file and the lock."""
    flock = fcntl.flock

    def collected_before(handle: int, kind: int) -> None:
        if not kind & fcntl.LOCK_NB:
            collect()
        flock(handle, kind)

    monkeypatch.setattr("fcntl.flock", collected_before)
    held = Scratch.make(Kind.RAY)
    collect()
    assert (held.path / ".lock").exists()
    held.remove()


def test_a_directory_is_empty_and_ends_with_its_context(place: Path) -> None:
    with scratch(Kind.CODE) as directory:
        assert list(directory.iterdir()) == []
    assert list(place.iterdir()) == []
