"""How the service ends where Ray does not end in order, on a clock of the tests' own."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from eval_service.cli.main import exit_code
from eval_service.fleet_config import ServiceConfig
from eval_service.ports import free_port
from eval_service.scratch import Kind, Scratch
from eval_service.serve import ending
from eval_service.serve.ending import GRACE_S, JOINED_GRACE_S, RAY_DIED, Ending, answers, ray_died

STOP_S = 40.0
CHILDREN = """
import subprocess, sys
from eval_service import orphans
orphans.adopt()
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
deaf = [sys.executable, "-c", deaf]
leaves = f"import subprocess; subprocess.Popen({deaf!r}, start_new_session=True).wait(0.5)"
held = subprocess.Popen(deaf, stdout=subprocess.PIPE)
held.stdout.readline()
left = subprocess.Popen([sys.executable, "-c", leaves], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
left.stdout.readline()
left.wait()
print(len(orphans.below()), flush=True)
orphans.end_below(0.1)
print(len(orphans.below()), flush=True)
"""


PART = """
import os, subprocess, sys
from eval_service import orphans
ends = [sys.executable, "-c", ""]
part = subprocess.Popen(ends)
os.waitid(os.P_PID, part.pid, os.WEXITED | os.WNOWAIT)
other = subprocess.Popen(ends)
os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
orphans.bury({part.pid})
print(os.path.exists(f"/proc/{part.pid}"), os.path.exists(f"/proc/{other.pid}"), part.wait())
"""


class Stand:
    """An ending whose Ray is a flag, and what the process would have ended with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: Path, gcs: str | None = None) -> None:
        monkeypatch.setenv("TMPDIR", str(place))
        monkeypatch.setattr("tempfile.tempdir", str(place))
        # This process's children are the tests' own.
        monkeypatch.setattr("eval_service.orphans.bury", lambda parts: None)
        monkeypatch.setattr("eval_service.orphans.end_below", lambda linger_s: None)
        self.stop = threading.Event()
        self.codes: list[int] = []
        self.scratch = Scratch.make(Kind.RAY)
        self.ending = Ending(self.stop, self.scratch, stop_s=STOP_S, leave_with=self.codes.append)
        if gcs is not None:
            self.ending.joined(gcs)

    def die(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ray is there, and is gone."""
        monkeypatch.setattr(self.ending, "_lives", lambda: False)


def test_without_ray_the_service_ends_as_it_was_told_to_or_with_its_code_and_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(ray_died()) == RAY_DIED
    for told, code in ((True, 0), (False, RAY_DIED)):
        stand = Stand(monkeypatch, tmp_path)
        assert not stand.ending.look(0.0)
        stand.die(monkeypatch)
        if told:
            stand.stop.set()
        assert not stand.ending.look(1.0)
        assert stand.ending.look(1.0 + GRACE_S)
        assert stand.codes == [code]
        assert list(tmp_path.iterdir()) == []
        assert ("Ray has died" in capsys.readouterr().err) is not told


def test_what_a_stop_may_take_holds_the_engines_handover(tmp_path: Path) -> None:
    usual, long = (ServiceConfig(roots=(tmp_path,), state_dir=tmp_path, handover_s=s) for s in (10.0, 120.0))
    assert usual.stop_s == 35.0
    assert long.stop_s == 145.0


def test_a_stop_that_does_not_come_to_its_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, tmp_path)
    assert not stand.ending.look(1000.0)
    stand.stop.set()
    assert not stand.ending.look(1000.0)
    assert not stand.ending.look(1000.0 + STOP_S - 1.0)
    assert stand.ending.look(1000.0 + STOP_S)
    assert stand.codes == [0]


def test_that_ray_ends_when_it_is_shut_down_is_as_it_should_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, tmp_path)
    stand.stop.set()
    stand.ending.leave()
    stand.die(monkeypatch)
    assert not stand.ending.look(0.0)
    assert not stand.ending.look(GRACE_S + 1.0)
    assert stand.ending.look(float("inf")), "but it has its time too"
    assert stand.codes == [0]


def test_a_joined_cluster_that_does_not_answer_is_waited_for_unless_the_service_is_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "_PROBE_S", 30.0)
    # A port that the kernel gives nobody else once it is free.
    with socket.create_server(("127.0.0.1", free_port("127.0.0.1"))) as listener:
        gcs = f"127.0.0.1:{listener.getsockname()[1]}"
        assert answers(gcs)
        stand = Stand(monkeypatch, tmp_path, gcs)
    assert not answers(gcs)
    assert not stand.ending.look(0.0)
    assert not stand.ending.look(500.0), "a head may be started anew"
    stand.stop.set()
    assert not stand.ending.look(501.0)
    assert stand.ending.look(501.0 + JOINED_GRACE_S)
    assert stand.codes == [0]


def test_what_is_below_a_process_is_ended_also_where_it_has_lost_its_parent_and_ignores_sigterm() -> None:
    root = str(Path(ending.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", CHILDREN], cwd=root, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.split() == ["2", "0"], done.stderr


def test_a_part_that_has_ended_and_that_nobody_waits_for_keeps_no_other_from_being_reaped() -> None:
    root = str(Path(ending.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", PART], cwd=root, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.split() == ["True", "False", "0"], done.stderr
