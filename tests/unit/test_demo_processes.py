"""Everything that a demo starts is found and ended, in whatever session it went; nobody else is touched."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from eval_service.demo.plan import DemoOptions, Plan
from eval_service.demo.processes import DemoError, Family
from eval_service.demo.run import Demo
from eval_service.demo.workspace import Workspace
from tests.support.processes import eventually

# A child that starts a grandchild in a session of its own, says its pid, and obeys SIGTERM without telling it.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""
DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(0, flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def family() -> Iterator[Family]:
    family = Family()
    yield family
    family.end(grace_s=0.1, linger_s=0.1)


def started(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> int:
    (tmp_path / "stand_in.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = family.start("stand-in", ["stand_in"], log=tmp_path / "log", cwd=tmp_path)
    while not (line := (tmp_path / "log").read_text()).endswith("\n"):
        child.must_run()
        child.wait(0.02)
    return int(line)


def test_a_grandchild_in_its_own_session_is_found_and_ended(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grandchild = started(family, tmp_path, monkeypatch, PARENT)
    eventually(lambda: family.owns(grandchild))
    left = family.end(grace_s=10, linger_s=0.2)
    assert [entry.split()[0] for entry in left] == [str(grandchild)]
    eventually(lambda: not family.owns(grandchild))  # what is killed ends when it has its turn
    eventually(lambda: family.members() == [])


def test_a_program_that_is_told_to_end_ends_what_it_started(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"""
import pathlib
from eval_service.demo.processes import Family, terminable
family, here = Family(), pathlib.Path({str(tmp_path)!r})
try:
    with terminable():
        child = family.start("a sleeper", ["deaf"], log=here / "deaf.log", cwd=here)
        while not (here / "deaf.log").read_text():
            child.wait(0.02)
        print(child.process.pid, flush=True)
        child.wait(600)
finally:
    family.end(grace_s=0.2, linger_s=0.2)
"""
    (tmp_path / "deaf.py").write_text(DEAF)
    monkeypatch.chdir(Path(__file__).parents[2])
    sleeper = started(family, tmp_path, monkeypatch, source)
    family.children[0].process.terminate()
    assert family.children[0].wait(60)
    assert not psutil.pid_exists(sleeper)


def test_a_child_that_ignores_sigterm_is_killed_and_named(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(family, tmp_path, monkeypatch, DEAF)
    assert family.end(grace_s=0.2, linger_s=0.2) == ["stand-in"]
    assert family.members() == []


def test_nobody_elses_process_is_ours(family: Family) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        assert not family.owns(stranger.pid)
        assert not family.owns(os.getpid())
        assert stranger.stdin is not None
        stranger.stdin.close()


def test_a_child_that_failed_shows_the_end_of_its_log(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stand_in.py").write_text("raise SystemExit('no such model')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = family.start("the service", ["stand_in"], log=tmp_path / "log", cwd=tmp_path)
    assert child.wait(30)
    with pytest.raises(DemoError, match=r"the service ended with code 1; .*log ends:\nno such model"):
        child.must_run()


LISTENER = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        server.accept()
"""


def test_a_port_that_somebody_else_has_been_given_since_is_not_left_behind(tmp_path: Path) -> None:
    demo = Demo(DemoOptions(out=tmp_path), Plan(), Workspace(tmp_path))
    with (
        socket.create_server(("127.0.0.1", 0)) as anothers,
        subprocess.Popen([sys.executable, "-c", LISTENER], cwd=tmp_path, stdout=subprocess.PIPE) as unmarked,
    ):
        assert unmarked.stdout is not None
        port = int(unmarked.stdout.readline())
        demo.seen.ports |= {anothers.getsockname()[1], port}
        demo._end()
        unmarked.kill()
    assert demo.left_behind == [f"port {port}"]
