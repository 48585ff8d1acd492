"""Scratch directories: whose user has died is collected, and nothing else ever."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from eval_service.engine import supervisor
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


@pytest.mark.parametrize("remove", ["scratch", "supervisor"])
@pytest.mark.parametrize("at", range(10))
def test_who_is_killed_while_it_removes_a_directory_leaves_what_is_collected(
    place: Path, monkeypatch: pytest.MonkeyPatch, remove: str, at: int
) -> None:
    """Its lock goes last, wherever the directory lists it; between that and the end it is empty."""
    held = Scratch.make(Kind.ENGINE)
    for name in (".a", "in", "sockets", "z"):
        (held.path / name).mkdir()
        (held.path / name / "file").touch()
    done = 0

    def unless_killed(call: Callable[..., None]) -> Callable[..., None]:
        def counted(*arguments: Any, **keywords: Any) -> None:
            nonlocal done
            done += 1
            if done > at:
                raise KeyboardInterrupt
            call(*arguments, **keywords)

        return counted

    with monkeypatch.context() as patch:
        for name in ("unlink", "rmdir"):
            patch.setattr(os, name, unless_killed(getattr(os, name)))
        with suppress(KeyboardInterrupt):
            held.remove() if remove == "scratch" else supervisor._remove(str(held.path))
    with suppress(OSError):
        os.close(held.lock)
    assert done > at, "it was done before it could be killed"
    collect()
    assert not held.path.exists() or (at == 9 and not list(held.path.iterdir()))


@pytest.mark.parametrize("remove", ["scratch", "supervisor"])
def test_what_somebody_adds_while_it_is_removed_goes_when_it_is_collected(
    place: Path, monkeypatch: pytest.MonkeyPatch, remove: str
) -> None:
    held, rmtree = Scratch.make(Kind.ENGINE), shutil.rmtree
    (held.path / "in").mkdir()

    def adding(path: Any, **keywords: Any) -> None:
        rmtree(path, **keywords)
        (held.path / "late").touch()

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", adding)
        held.remove() if remove == "scratch" else supervisor._remove(str(held.path))
    assert (held.path / "late").exists()
    with suppress(OSError):
        os.close(held.lock)
    collect()
    assert not held.path.exists()


@pytest.mark.parametrize("remove", ["scratch", "supervisor"])
def test_what_goes_by_itself_meanwhile_keeps_nothing_else(
    place: Path, monkeypatch: pytest.MonkeyPatch, remove: str
) -> None:
    """As the sockets and files of a server that is just ending."""
    held, unlink = Scratch.make(Kind.ENGINE), os.unlink
    for name in ("a", "b", "in/c", "in/d"):
        (held.path / name).parent.mkdir(exist_ok=True)
        (held.path / name).touch()

    def gone_before(path: Any, **keywords: Any) -> None:
        unlink(path, **keywords)
        if Path(os.fspath(path)).name != ".lock":
            raise FileNotFoundError(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", gone_before)
        held.remove() if remove == "scratch" else supervisor._remove(str(held.path))
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
