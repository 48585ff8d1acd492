"""`evalfleet top`, `show`, `upload`, and a shell that completes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.core import TyperGroup

from eval_service.cli import main
from eval_service.cli.frames import Looker, render
from eval_service.cli.output import plain
from eval_service.contract.curves import DrainView
from eval_service.contract.errors import Unavailable
from eval_service.contract.states import PointState
from eval_service.contract.wire import AttemptView, FleetView, GroupView
from tests.support.command import Command
from tests.support.fake_service import FakeService
from tests.support.stub_service import StubService, serving
from tests.support.tiny_snapshots import publish, tiny
from tests.support.views import engine, point

ROOT = Path(__file__).parents[2]
WAIT_S = 30.0


@pytest.fixture
def service() -> FakeService:
    running = point(200, state=PointState.RUNNING)
    busy = engine("eval-1", point=running.id, in_flight=7, weight_version="abcd.1")
    group = GroupView(name="eval", kind="pinned", grade="fake", desired=1, ready=1, engines=(busy,))
    drain = DrainView(drain="d1", run="demo", started_at=time.time(), deadline=time.time() + 60, ended_at=None)
    attempt = AttemptView(number=1, started_at=1.0, ended_at=3.5, outcome="lost", detail="e9 died", engines=("e9",))
    return FakeService(
        points=[point(100, 0.25, history=(attempt,)), running, point(300)],
        fleet=FleetView(groups=(group,), seen_at=1.0),
        open_drains=[drain],
    )


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], service: FakeService) -> Command:
    return Command(monkeypatch, capsys, service)


def test_one_frame_without_a_terminal_has_all_that_goes_on(command: Command) -> None:
    ran = command("top", "--once")
    assert ran.code == 0
    assert "\x1b" not in ran.out
    told = ("demo", "eval-1", "abcd.1", "running", "queue: 1", "drains", "epoch 3", "letters 0.500")
    assert [word for word in told if word not in ran.out] == []


def test_one_frame_as_json_is_one_document(command: Command) -> None:
    frame = json.loads(command("top", "--once", "--json").out)
    assert [view["step"] for view in frame["under_way"]] == [200]
    assert [view["step"] for view in frame["queued"]] == [300]
    assert frame["fleet"]["groups"][0]["engines"][0]["in_flight"] == 7
    assert frame["drains"][0]["drain"] == "d1"


def test_a_service_that_was_never_there_is_an_error(command: Command, service: FakeService) -> None:
    service.down = True
    assert command("top", "--once").code == 4


def test_a_restart_of_the_service_is_told_of_and_outlived(service: FakeService) -> None:
    looker = Looker(service.connect("http://service"))
    assert looker.look().note is None
    service.down = True
    away = looker.look()
    assert "can't be reached" in (away.note or "")
    assert away.under_way[0].step == 200  # what was seen last
    service.down = False
    assert "is back" in (looker.look().note or "")
    assert looker.look().note is None
    service.epoch = 4
    assert "epoch 4" in (looker.look().note or "")


def test_a_service_that_was_never_reached_is_no_frame(service: FakeService) -> None:
    service.down = True
    with pytest.raises(Unavailable):
        Looker(service.connect("http://service")).look()


def test_no_text_of_others_reaches_the_terminal_as_a_command(service: FakeService) -> None:
    evil = engine("eval-1", detail="\x1b]0;owned\x07\x1b[2J [bold]markup[/bold]")
    group = service.fleet.groups[0].model_copy(update={"engines": (evil,)})
    service.fleet = service.fleet.model_copy(update={"groups": (group,)})
    console = Console(width=200, record=True, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(render(Looker(service.connect("http://service")).look(), 2))
    shown = console.export_text(styles=False)
    console.file.close()
    assert "\x1b" not in shown
    assert "[bold]markup" in shown
    assert plain("\x1b[2J\n") == r"\x1b[2J\n"


def test_a_narrow_or_low_terminal_shows_less_and_says_so(service: FakeService) -> None:
    service.points += [point(step) for step in range(400, 440)]
    service.page = 100
    frame = Looker(service.connect("http://service")).look()
    console = Console(width=40, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render(frame, 3))
    shown = console.export_text()
    console.file.close()
    assert "queue: 41 (38 more)" in shown
    assert max(len(line) for line in shown.splitlines()) <= 40


# --- a terminal, and a shell


@pytest.fixture
def stub() -> Iterator[StubService]:
    with serving(StubService()) as service:
        yield service


def read_until(terminal: int, wanted: bytes) -> bytes:
    seen, until = b"", time.monotonic() + WAIT_S
    while wanted not in seen and time.monotonic() < until:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                seen += os.read(terminal, 65536)
            except OSError:  # the other end is closed
                break
    assert wanted in seen, seen
    return seen


_TOP = """
import sys
from eval_service.cli import main, options
from tests.support.fake_service import FakeService
from tests.support.views import point
options.connect = FakeService(points=[point(1)]).connect
sys.argv = ["evalfleet", "top", "--interval", "300"]
main.main()
"""


def test_on_a_terminal_it_is_drawn_anew_at_once_when_resized_and_q_ends_it() -> None:
    ours, theirs = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", _TOP], stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT)
    os.close(theirs)
    try:
        first = read_until(ours, b"queue: 1")
        assert b"\x1b[?1049h" in first  # the whole screen
        child.send_signal(signal.SIGWINCH)
        read_until(ours, b"queue: 1")  # long before the interval is over
        os.write(ours, b"q")
        read_until(ours, b"\x1b[?1049l")  # as it was
        assert child.wait(WAIT_S) == 0
    finally:
        child.kill()
        child.wait(WAIT_S)
        os.close(ours)


_COMPLETE = """
eval "$(_EVALFLEET_COMPLETE=source_bash evalfleet)"
complete -p evalfleet
COMP_WORDS=(evalfleet dra) COMP_CWORD=1
_evalfleet_completion evalfleet
echo "commands: ${COMPREPLY[*]}"
COMP_WORDS=(evalfleet points al) COMP_CWORD=2
_evalfleet_completion evalfleet
echo "runs: ${COMPREPLY[*]}"
"""


# Who completes waits two seconds for the service; one of a busy machine's tests may take longer to answer.
_PATIENT = "from eval_service.cli import main, options; options._COMPLETION_S = 30.0; main.main()"


def test_bash_completes_commands_and_the_names_of_runs(tmp_path: Path, stub: StubService) -> None:
    status = {"version": "1", "epoch": 1, "controller_at": None, "controller_alive": True, "engines": {}, "points": {}}
    stub.away = lambda route: route == "GET /status"
    stub.away_reply = (200, {**status, "runs": {"alpha": {}, "alps": {}, "beta": {}}})
    program = tmp_path / "evalfleet"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -c "{_PATIENT}" "$@"\n')
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "EVALFLEET_URL": stub.url}
    ran = subprocess.run(
        ["bash", "--norc", "-c", _COMPLETE], env=env, capture_output=True, text=True, timeout=3 * WAIT_S, check=True
    )
    assert "_evalfleet_completion evalfleet" in ran.stdout
    assert "commands: drain" in ran.stdout
    assert re.search(r"runs: alpha\s+alps$", ran.stdout, re.MULTILINE), ran.stdout


# --- show, upload


def test_show_tells_a_points_attempts_with_their_faults(command: Command) -> None:
    ran = command("show", "demo", "100")
    for told in ("lost", "e9 died", "2.500", "exact_match", "canary (00000000.1)", "/snapshots/demo/step_100"):
        assert told in ran.out
    assert [view["step"] for view in json.loads(command("show", "demo", "100", "--json").out)] == [100]
    assert command("show", "demo", "9").code == 2


def test_upload_prints_the_url_and_dispatches_from_there(
    command: Command, service: FakeService, tmp_path: Path
) -> None:
    published = publish(tiny(), tmp_path / "runs")
    prefix = f"file://{tmp_path}/bucket"
    told = json.loads(command("upload", str(published.path), prefix, "--dispatch", "--json").out)
    assert told["url"] == f"{prefix}/r1/{published.path.name}"
    [request] = service.dispatches
    assert (request.snapshot, request.digest) == (told["url"], published.manifest.digest)
    assert json.loads(command("doctor", told["url"], "--json").out)["ok"] is True
    (tmp_path / "bucket" / "r1" / published.path.name / "config.json").write_text("{}")
    ran = command("doctor", told["url"])
    assert ran.code == 1
    assert "snapshot_altered" in ran.out


# --- all commands


_ASKED = (
    "status runs points show samples diff compare retry cancel pause resume drain backfill watch scale doctor check "
    "chaos export fleet hold release delete endpoint top upload"
)
_ALONE = {"doctor", "chaos"}  # they talk to no service


def test_every_command_for_people_and_scripts_has_json_url_and_its_variable() -> None:
    found = typer.main.get_command(main.app)
    assert isinstance(found, TyperGroup)
    commands = found.commands
    assert set(_ASKED.split()) <= set(commands)
    for name in _ASKED.split():
        options = {spelling: parameter for parameter in commands[name].params for spelling in parameter.opts}
        assert "--json" in options, name
        if name not in _ALONE:
            assert options["--url"].envvar == "EVALFLEET_URL", name
