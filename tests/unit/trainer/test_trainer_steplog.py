"""The step log, the rate and the stop flag."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from trainer.config import TrainSection
from trainer.crash import VARIABLE, InjectedFault, crash_point
from trainer.steplog import StepLog, read_steplog
from trainer.stopping import SAME_WISH_S, StopFlag, Stopped


def test_numbers_go_on_over_launches_and_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "out" / "steps.jsonl"
    first = StepLog(path, clock=lambda: 5.0)
    first.write("start", step=1)
    first.close()
    with path.open("a") as file:
        file.write('{"seq": 2, "ev')
    second = StepLog(path, clock=lambda: 6.0)
    second.write("start")
    second.close()
    assert [(e["seq"], e["time"]) for e in read_steplog(path)] == [(1, 5.0), (2, 6.0)]


def test_what_a_thread_that_was_given_up_tells_of_a_closed_log_raises_nothing(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    log.write("start")
    log.close()
    log.write("eval_exported")
    log.close()
    assert [entry["event"] for entry in read_steplog(log.path)] == ["start"]


def test_a_stop_is_a_flag_that_cuts_waits_until_the_drain() -> None:
    stop = StopFlag()
    with stop.installed():
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set
    with pytest.raises(Stopped):
        stop.sleep(10)
    stop.cuts_waits = False
    stop.sleep(0)


def test_a_signal_that_comes_several_ways_is_one_wish_and_a_later_one_is_death(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    died: list[int] = []
    stop = StopFlag(clock=lambda: now)
    monkeypatch.setattr(signal, "raise_signal", died.append)
    with stop.installed():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        now += SAME_WISH_S
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.is_set, died) == (True, [])
        now += 0.1
        os.kill(os.getpid(), signal.SIGTERM)
        assert died == [signal.SIGTERM]


def test_a_crash_point_is_silent_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    crash_point("in_step", 3)
    monkeypatch.setenv(VARIABLE, "in_step:3:raise")
    crash_point("in_step", 33)
    crash_point("in_export", 3)
    with pytest.raises(InjectedFault):
        crash_point("in_step", 3)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.5, 1.0, 1.0, 1.0]), ("linear", [0.5, 1.0, 0.55, 0.1]), ("cosine", [0.5, 1.0, 0.55, 0.1])],
)
def test_the_rate_warms_up_and_ends_at_its_least(schedule: str, expected: list[float]) -> None:
    from trainer.optim import learning_rate

    config = TrainSection.model_validate(
        {"num_steps": 10, "lr": 1.0, "min_lr": 0.1, "warmup_steps": 2, "schedule": schedule}
    )
    assert [learning_rate(step, config) for step in (1, 2, 6, 10)] == pytest.approx(expected)
