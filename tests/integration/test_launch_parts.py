"""What a launch does with its parts: what each is told, in which order they end, and that none is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.live import wait_for

ROOT = Path(__file__).parents[2]
ENDS_S = 40.0


class Launched:
    """A launch of stand-ins under way."""

    def __init__(self, base: Path, plan: dict[str, Any], env: dict[str, str]) -> None:
        self._events = base / "events.jsonl"
        command = [sys.executable, "-m", "tests.support.launch_parts", "launch", str(base), json.dumps(plan)]
        path = {"PYTHONPATH": str(ROOT), "BASE": str(base)}
        self._errors = base / "stderr.txt"
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(command, env={**os.environ, **path, **env}, cwd=base, stderr=errors)

    @property
    def stderr(self) -> str:
        """What it has said."""
        return self._errors.read_text()

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Those of the named kinds, in order; of a line that is being written nothing is known yet."""
        text = self._events.read_text() if self._events.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        return [event for event in map(json.loads, lines) if event["event"] in names]

    def until(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait for so many of them."""
        return wait_for(lambda: found if len(found := self.events(name)) >= count else None, name, ENDS_S)

    def ends(self) -> int:
        """Wait for its end, and see that nothing is left; its exit code."""
        code = self.process.wait(ENDS_S)
        pids = {event["pid"] for event in self.events("service", "sleeper", "torchrun", "rank")}
        wait_for(lambda: not [pid for pid in pids if lives(pid)], "the end of all", ENDS_S)
        return code


def lives(pid: int) -> bool:
    """Whether it is there, and no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


FACTS: dict[str, Any] = {
    "run": "r",
    "root": "/r",
    "output_dir": "/o",
    "tensor": 2,
    "pipeline": 1,
    "data": 1,
    "ranks": 2,
    "starts_inference_engines": True,
    "has_engines": True,
    "allow_shared_gpu": False,
    "evaluates": True,
    "url": None,
    "suites": ["s"],
    "drain_timeout_s": 20.0,
    "on_timeout": "leave",
    "start": None,
    "num_steps": 10,
    "points": [],
    "plan": "points at steps 0, 10 (final)",
    "buffer_bytes": 0,
}


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start a launch, with changes to the facts; whatever is left at the end is killed."""
    held: list[Launched] = []

    def start(env: dict[str, str] | None = None, gpus: int = 0, engines: int = 2, **facts: Any) -> Launched:
        held.append(Launched(tmp_path, {"facts": {**FACTS, **facts}, "gpus": gpus, "engines": engines}, env or {}))
        return held[-1]

    yield start
    for launch in held:
        launch.process.kill()
        launch.process.wait()
        for event in launch.events("service", "sleeper", "torchrun", "rank"):
            if lives(event["pid"]):
                os.kill(event["pid"], signal.SIGKILL)


def test_each_child_sees_its_own_gpus_and_the_trainer_where_the_service_is(launched: Callable[..., Launched]) -> None:
    launch = launched(gpus=4)
    assert launch.ends() == 0
    (service,), ranks = launch.events("service"), launch.events("rank")
    assert service["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["0,1", "0,1"]
    first, second = launch.events("start")
    assert (first["part"], second["part"]) == ("service", "trainer")
    port = first["arguments"][-1]
    assert {rank["EVALFLEET_URL"] for rank in ranks} == {f"http://127.0.0.1:{port}"}
    assert "--nproc-per-node=2" in second["arguments"]
    assert second["arguments"][-4:] == ["-m", "trainer.main", "--config", "run.toml"]


def test_on_a_host_without_gpus_no_child_sees_any(launched: Callable[..., Launched]) -> None:
    launch = launched()
    assert launch.ends() == 0
    assert {event["CUDA_VISIBLE_DEVICES"] for event in launch.events("service", "rank")} == {""}


def test_where_no_engine_starts_there_is_no_service_and_the_trainer_has_all_gpus(
    launched: Callable[..., Launched],
) -> None:
    launch = launched(
        {"EVALFLEET_URL": "http://10.0.0.1:1"},
        gpus=2,
        starts_inference_engines=False,
        has_engines=False,
        evaluates=False,
    )
    assert launch.ends() == 0
    assert launch.events("service", "sleeper") == []
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in launch.events("rank")] == ["0,1", "0,1"]
    assert {rank["EVALFLEET_URL"] for rank in launch.events("rank")} == {""}


def test_the_exit_code_is_the_trainers(launched: Callable[..., Launched]) -> None:
    launch = launched({"RANKS": "end:7"})
    assert launch.ends() == 7
    assert [event["event"] for event in launch.events("rank", "service_ended")] == ["rank", "rank", "service_ended"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_trainer_drain_and_then_ends_the_service(
    launched: Callable[..., Launched], number: signal.Signals
) -> None:
    launch = launched({"RANKS": "train", "DRAIN_S": "1.0"})
    launch.until("rank", 2)
    launch.process.send_signal(number)
    assert launch.ends() == 143
    assert [event["event"] for event in launch.events("drained", "service_ended")] == ["drained", "service_ended"]


def test_a_second_signal_ends_the_trainer_without_its_drain(launched: Callable[..., Launched]) -> None:
    launch = launched({"RANKS": "train", "DRAIN_S": "60"})
    launch.until("rank", 2)
    launch.process.terminate()
    launch.until("draining")
    launch.process.terminate()
    assert launch.ends() == 143
    assert [event["event"] for event in launch.events("drained", "service_ended")] == ["service_ended"]


def test_a_service_that_dies_is_told_of_and_training_goes_on(launched: Callable[..., Launched]) -> None:
    launch = launched({"RANKS": "train"})
    (service,), (engine,), ranks = launch.until("service"), launch.until("sleeper"), launch.until("rank", 2)
    os.kill(service["pid"], signal.SIGKILL)
    wait_for(lambda: "training goes on" in launch.stderr, "the word of it")
    assert all(lives(rank["pid"]) for rank in ranks)
    wait_for(lambda: not lives(engine["pid"]), "the end of what it left", ENDS_S)
    launch.process.terminate()
    assert launch.ends() == 143
    assert launch.events("drained")


def test_ranks_that_outlive_torchrun_get_their_drain_and_none_is_left(launched: Callable[..., Launched]) -> None:
    launch = launched({"RANKS": "train"})
    launch.until("rank", 2)
    os.kill(launch.until("torchrun")[0]["pid"], signal.SIGKILL)
    assert launch.ends() == 128 + signal.SIGKILL
    assert [event["event"] for event in launch.events("drained", "service_ended")] == ["drained", "service_ended"]


def test_points_that_a_trainer_left_are_waited_for_or_cancelled_as_on_timeout_says(
    launched: Callable[..., Launched], tmp_path: Path
) -> None:
    (tmp_path / "open").write_text("2")
    launch = launched({"RANKS": "end:1"})
    assert launch.ends() == 1
    order = [event["event"] for event in launch.events("looked", "drain", "service_ended")]
    assert order == ["looked", "looked", "service_ended"]
    (tmp_path / "events.jsonl").unlink()
    launch = launched({"RANKS": "end:1"}, on_timeout="abort")
    assert launch.ends() == 1
    assert [event.get("on_timeout") for event in launch.events("drain")] == ["abort"]


def test_a_service_that_does_not_come_up_ends_the_launch_with_its_own_words(launched: Callable[..., Launched]) -> None:
    launch = launched({"SERVICE": "refuses"})
    assert launch.ends() == 1  # the command's own edge turns the error into a line and a code
    assert "groups.eval.model: no such model" in launch.stderr
    assert launch.events("rank") == []


def test_a_launch_that_is_killed_takes_its_parts_along(launched: Callable[..., Launched]) -> None:
    launch = launched({"RANKS": "train"})
    launch.until("rank", 2)
    (torchrun,) = launch.until("torchrun")
    launch.process.kill()
    wait_for(lambda: bool(launch.events("service_ended")) and not lives(torchrun["pid"]), "both ends", ENDS_S)
