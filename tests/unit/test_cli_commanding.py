"""The commands that change something: which points they ask about, what they print, and what they refuse to guess."""

from __future__ import annotations

import json
import sys
from io import StringIO

import pytest

from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import LeftPoint, PointRef, RunCommandReply
from tests.support.command import Command
from tests.support.fake_service import FakeService
from tests.support.views import point


@pytest.fixture
def service() -> FakeService:
    return FakeService(
        points=[
            point(0, 0.1),
            point(100, state=PointState.FAILED, reason=Reason.DEADLINE),
            point(100, suite="words", state=PointState.RUNNING),
            point(200, state=PointState.QUEUED),
        ]
    )


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], service: FakeService) -> Command:
    return Command(monkeypatch, capsys, service)


def test_retry_asks_for_the_points_of_a_step_that_ended_without_a_result(
    command: Command, service: FakeService
) -> None:
    ran = command("retry", "demo", "100")
    assert service.asked == [("retry", "p100-letters")]
    assert ran.out.splitlines()[1].split() == ["100", "letters", "failed", "deadline", "-"]


def test_retry_of_a_done_point_says_what_the_service_says(command: Command) -> None:
    ran = command("retry", "demo", "0")
    assert (ran.code, ran.err) == (2, "evalfleet: error: id: the point is done\n")


def test_cancel_asks_for_what_is_open_of_a_step_or_a_suite(command: Command, service: FakeService) -> None:
    command("cancel", "demo", "100")
    command("cancel", "demo", "200", "--suite", "letters")
    assert service.asked == [("cancel", "p100-words"), ("cancel", "p200-letters")]


def test_cancel_without_a_step_is_of_the_whole_run(command: Command, service: FakeService) -> None:
    ref = PointRef(id="p200-letters", suite="letters", state=PointState.CANCELLED, reason=Reason.USER)
    service.command_reply = RunCommandReply(run="demo", points=(ref,))
    ran = command("cancel", "demo")
    assert service.asked == [("cancel", "demo")]
    assert ran.out.splitlines()[1].split() == ["200", "letters", "cancelled", "user"]


def test_cancel_of_a_suite_without_a_step_is_not_taken_for_the_whole_run(
    command: Command, service: FakeService
) -> None:
    assert command("cancel", "demo", "--suite", "letters").code == 2
    assert service.asked == []


def test_backfill_tells_what_was_left_and_why(command: Command, service: FakeService) -> None:
    left = LeftPoint(point="p1", step=100, suite="letters", why="its snapshot /s was deleted")
    service.command_reply = RunCommandReply(run="demo", points=(), left=(left,))
    ran = command("backfill", "demo")
    assert ran.out.splitlines() == ["no point", "left: step 100 letters: its snapshot /s was deleted"]
    assert json.loads(command("backfill", "demo", "--json").out)["left"][0]["step"] == 100


@pytest.mark.parametrize("verb", ["hold", "release"])
def test_a_snapshot_that_suites_share_is_held_once(command: Command, service: FakeService, verb: str) -> None:
    ran = command(verb, "demo", "100", "--json")
    assert len(service.asked) == 1
    assert service.asked[0][0] == verb
    assert len(json.loads(ran.out)) == 1


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_a_run_is_paused_and_resumed(command: Command, service: FakeService, verb: str) -> None:
    ran = command(verb, "demo")
    assert service.asked == [(verb, "demo")]
    assert ran.out.startswith("demo is active")
    assert json.loads(command(verb, "demo", "--json").out)["run"] == "demo"


def test_delete_with_nobody_to_ask_wants_yes(command: Command, service: FakeService) -> None:
    command.patch.setattr(sys, "stdin", StringIO("y\n"))
    ran = command("delete", "demo")
    assert (ran.code, "--yes" in ran.err, service.asked) == (2, True, [])
    assert command("delete", "demo", "--yes").code == 0
    assert service.asked == [("delete", "demo")]


class Terminal(StringIO):
    """Somebody types."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "asked"), [("y\n", [("delete", "demo")]), ("n\n", []), ("", [])])
def test_delete_asks_and_does_nothing_unless_told_yes(
    command: Command, service: FakeService, answer: str, asked: list[tuple[str, str]]
) -> None:
    command.patch.setattr(sys, "stdin", Terminal(answer))
    ran = command("delete", "demo")
    assert service.asked == asked
    assert "Delete all of it?" in ran.err
    assert ran.code == (0 if asked else 1)


@pytest.mark.parametrize("verb", ["retry", "hold", "release", "cancel"])
def test_a_step_without_a_point_names_the_field_and_the_fix(command: Command, verb: str) -> None:
    ran = command(verb, "demo", "7")
    assert (ran.code, ran.err) == (
        2,
        "evalfleet: error: step: run demo has no point at step 7 (see `evalfleet points demo`)\n",
    )


def test_scale_asks_for_a_number_of_engines_and_auto_gives_the_say_back(command: Command, service: FakeService) -> None:
    ran = command("scale", "3")
    assert ran.out == "eval: 3 engines (0 to 4)\n"
    assert command("scale", "auto", "--group", "judge").out == "judge: as its config says (0 to 4)\n"
    assert service.asked == [("scale", "eval 3"), ("scale", "judge None")]
    assert json.loads(command("scale", "0", "--json").out)["engines"] == 0


@pytest.mark.parametrize("engines", ["many", "1.5"])
def test_scale_refuses_what_is_no_number(command: Command, service: FakeService, engines: str) -> None:
    ran = command("scale", engines)
    assert (ran.code, service.asked) == (2, [])
    assert "a number, or `auto`" in ran.err


def test_endpoint_serves_an_ended_point_of_the_step_and_prints_its_address(
    command: Command, service: FakeService
) -> None:
    ran = command("endpoint", "demo", "100", "--for", "60")
    assert ran.out == "http://proxy:8710/lanes/p100-letters\n"
    assert service.asked == [('POST serve {"for_s":60.0}', "p100-letters")]


def test_endpoint_prints_nothing_but_the_address_for_a_shell_to_take_while_no_engine_serves_it_yet(
    command: Command, service: FakeService
) -> None:
    service.serving_engines = 0
    ran = command("endpoint", "demo", "100")
    assert ran.out == "http://proxy:8710/lanes/p100-letters\n"
    assert ran.err == "evalfleet endpoint: no engine serves it yet: requests wait for one\n"


def test_endpoint_close_ends_what_is_served_of_the_step_whichever_suite_it_was_opened_by(
    command: Command, service: FakeService
) -> None:
    assert "not served" in command("endpoint", "demo", "100", "--close").err
    service.served = frozenset({"p100-words"})
    assert command("endpoint", "demo", "100", "--close").out.splitlines()[-1] == "closed"
    assert service.asked[-1] == ("DELETE serve", "p100-words")
