"""The reading commands and drain, against a service in memory: output, JSON, errors and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eval_service.cli.main import app
from eval_service.contract.results import Alarm, AlarmKind, Metric
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import EndedPoint, FleetView, GroupView
from tests.support.command import Command
from tests.support.fake_service import FakeService
from tests.support.views import engine, point, receipt, sample


@pytest.fixture
def service() -> FakeService:
    points = [point(step, step / 400) for step in (100, 0, 200, 300)]
    samples = [sample(index, score=float(index % 2)) for index in range(8)]
    group = GroupView(name="eval", kind="pinned", grade="fake", desired=2, ready=1, engines=(engine("eval-1"),))
    return FakeService(points=points, samples={"p100-letters": samples}, fleet=FleetView(groups=(group,), seen_at=1.0))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], service: FakeService) -> Command:
    return Command(monkeypatch, capsys, service)


def test_points_come_in_step_order_over_all_pages(command: Command) -> None:
    ran = command("points", "demo")
    assert [line.split()[0] for line in ran.out.splitlines()] == ["step", "0", "100", "200", "300"]


def test_points_leave_out_what_was_superseded(command: Command, service: FakeService) -> None:
    service.points.append(point(100, 0.99, id="older", superseded=True))
    assert len(json.loads(command("points", "demo", "--json").out)) == 4


def test_points_say_why_a_point_has_no_score(command: Command, service: FakeService) -> None:
    service.points = [point(5, state=PointState.SKIPPED, reason=Reason.SNAPSHOT_INVALID, detail="NaN in lm_head")]
    assert "snapshot_invalid: NaN in lm_head" in command("points", "demo").out


def test_samples_show_what_was_wrong_up_to_the_limit(command: Command) -> None:
    ran = command("samples", "demo", "100", "--wrong", "--limit", "3")
    assert [line.split()[0] for line in ran.out.splitlines()] == ["wrong"] * 3
    assert "'cba'" in ran.out


def test_samples_are_found_by_kind_and_by_text_by_the_service(command: Command, service: FakeService) -> None:
    kinds = [
        sample(0, finish_reason="length", score=0.0),
        sample(1, output=" ", score=0.0),
        sample(2, unparsed=True, score=0.0),
        sample(3, error="too long"),
        sample(4),
    ]
    service.samples = {"p100-letters": kinds}
    flags = ("--truncated", "--empty", "--unparsed", "--errored")
    told = [command("samples", "demo", "100", flag).out.split()[0] for flag in flags]
    assert told == ["truncated", "empty", "unparsed", "error"]
    assert len(command("samples", "demo", "100", "--errored", "--truncated").out.splitlines()) == 2
    assert command("samples", "demo", "100", "--search", "sort 4").out.startswith("right")
    assert command("samples", "demo", "100", "--search", "nowhere").out == "no such samples\n"


def test_points_show_intervals_and_alarms_with_what_raised_them(command: Command, service: FakeService) -> None:
    metric = Metric(value=0.5, n=9, low=0.25, high=0.75)
    alarm = Alarm(kind=AlarmKind.SCORE_COLLAPSE, message="from 0.9 to 0.5")
    service.points = [point(5, 0.5, headline="exact_match", metrics={"exact_match": metric}, alarms=(alarm,))]
    out = command("points", "demo").out
    assert "0.250..0.750" in out
    assert out.splitlines()[-1] == "step 5 letters: score_collapse: from 0.9 to 0.5"


def test_samples_as_json_are_all_of_the_pages(command: Command) -> None:
    assert [found["index"] for found in json.loads(command("samples", "demo", "100", "--json").out)] == list(range(8))


def test_samples_of_a_step_without_a_point_name_the_field_and_the_fix(command: Command) -> None:
    ran = command("samples", "demo", "7")
    assert ran.code == 2
    assert ran.err == "evalfleet: error: step: run demo has no point at step 7 (see `evalfleet points demo`)\n"


@pytest.mark.parametrize("name", ["status", "fleet", "runs"])
def test_views_are_shown_as_text_and_as_json(command: Command, name: str) -> None:
    assert command(name).code == 0
    assert json.loads(command(name, "--json").out)


def test_fleet_shows_how_many_engines_are_ready(command: Command) -> None:
    ran = command("fleet")
    assert "eval (fake): 1 of 2 ready" in ran.out
    assert "4242" in ran.out


def test_a_service_that_is_not_there_exits_4_in_one_line(command: Command, service: FakeService) -> None:
    service.down = True
    ran = command("status", "--url", "http://127.0.0.1:1")
    assert ran.code == 4
    assert ran.err.count("\n") == 1
    assert "is `evalfleet serve` running at this address?" in ran.err


def test_the_url_can_come_from_the_environment(
    command: Command, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.down = True
    monkeypatch.setenv("EVALFLEET_URL", "http://elsewhere:9")
    assert "http://elsewhere:9/status" in command("status").err


def test_usage_errors_exit_2(command: Command) -> None:
    assert command("points").code == 2
    assert command("samples", "demo", "-1").code == 2
    assert command("nonsense").code == 2


def test_drain_exits_0_when_every_point_has_ended(command: Command, service: FakeService) -> None:
    done = EndedPoint(step=0, suite="letters")
    service.receipts = [
        receipt(open=True, drained=False, ended_at=None, pending=(done,)),
        receipt(done=(done,)),
    ]
    ran = command("drain", "demo", "--timeout", "30")
    assert ran.code == 0
    assert ran.out == "drained: 1 done\n"
    assert ran.err == "draining demo: 0 of 1\n"
    assert service.drains[0].timeout_s == 30
    assert service.drains[0].drain == service.drains[1].drain


def test_drain_exits_3_when_the_time_is_up_and_says_what_is_left(command: Command, service: FakeService) -> None:
    late = EndedPoint(step=300, suite="letters")
    lost = EndedPoint(step=200, suite="letters", reason="busy", detail="over the bound")
    service.receipts = [receipt(drained=False, timed_out=True, pending=(late,), skipped=(lost,))]
    ran = command("drain", "demo", "--on-timeout", "abort")
    assert ran.code == 3
    assert ran.out.splitlines() == [
        "time is up: 1 skipped, 1 pending",
        "  step 200 letters: skipped (busy: over the bound)",
        "  step 300 letters: pending",
    ]
    assert service.drains[0].on_timeout == "abort"


def test_drain_as_json_is_the_receipt(command: Command, service: FakeService) -> None:
    service.receipts = [receipt()]
    ran = command("drain", "demo", "--json")
    assert json.loads(ran.out)["drained"] is True
    assert ran.err == ""


def test_help_loads_no_heavy_library() -> None:
    heavy = "torch ray transformers sglang fastapi numpy matplotlib sqlalchemy pyarrow"
    code = f"""
import sys
from eval_service.cli.main import app
loaded = [name for name in {heavy.split()} if name in sys.modules]
sys.exit(", ".join(loaded) or 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)


@pytest.mark.parametrize("name", [command.name or "" for command in app.registered_commands])
def test_every_command_has_help(command: Command, name: str) -> None:
    ran = command(name, "--help")
    assert ran.code == 0
    assert "Usage:" in ran.out


def test_nothing_that_models_datasets_or_engines_wrote_is_obeyed_by_the_terminal(
    command: Command, service: FakeService
) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\r\x9b1m\u202e"
    service.points = [point(5, state=PointState.FAILED, reason=Reason.DEADLINE, detail=evil, headline=evil)]
    service.samples = {"p5-letters": [sample(0, output=evil, prompt=evil, answer=evil), sample(1, error=f"{evil}\nx")]}
    group = GroupView(name="eval", kind="pinned", grade="fake", desired=1, ready=1, engines=(engine("e", detail=evil),))
    service.fleet = FleetView(groups=(group,), seen_at=1.0)
    for words in ("samples demo 5", "show demo 5", "points demo", "fleet", f"show demo{evil} 5"):
        ran = command(*words.split(" "))
        told = ran.out + ran.err
        assert r"\x1b[2J" in told, words
        assert set(told) - {"\n"} <= {c for c in told if c.isprintable()}, words
