"""`evalfleet launch`, for real: two gloo ranks, the service and an SGLang engine, by one command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from eval_service.demo.processes import Family
from tests.support.live import Live, Training

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run over two tensor-parallel ranks, with three points, and the other files beside it."""
    live = Live(tmp_path, Family(), bounds="1")
    live.build()
    settings: dict[str, Any] = {
        "train": {"num_steps": 4},
        "parallel": {"tensor": 2},
        # The engine may come up after the last step.
        "eval": {"url": None, "interval": 2, "drain_timeout_s": 300.0},
    }
    training = Training(live, "one", settings)
    fleet = (tmp_path / "fleet.toml").read_text()
    (tmp_path / "fleet.toml").write_text(fleet.replace("[service]\n", "[service]\nport = 0\n"))
    (tmp_path / "run.toml").write_text(training.toml())
    return tmp_path / "run.toml"


def command(*arguments: str) -> list[str]:
    """The command line."""
    return [sys.executable, "-m", "eval_service.cli.main", "launch", *arguments]


@pytest.mark.timeout(600)
def test_one_command_trains_over_two_ranks_evaluates_all_points_and_leaves_nothing_running(run_file: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command("--config", str(run_file)),
        env=env,
        cwd=run_file.parent,
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "plan: points at steps 0, 2, 4 (final)" in done.stdout
    receipt = json.loads((run_file.parent / "trainers" / "one" / "out" / "receipt.json").read_text())
    assert [point["step"] for point in receipt["done"]] == [0, 2, 4]
    assert [process.pid for process in psutil.process_iter() if str(run_file.parent) in _line(process)] == []


def test_a_plan_says_who_gets_which_gpu_and_starts_nothing(run_file: Path) -> None:
    """Also where the host it is made on has no GPU, and the one it is made for has."""
    base = run_file.parent
    fleet = (base / "fleet.toml").read_text()
    of_eval = fleet[: fleet.index("[groups.judge]")]
    fleet = of_eval.replace('grade = "sglang-cpu"', "").replace("num_gpus_per_engine = 0", "num_gpus_per_engine = 2")
    (base / "fleet.toml").write_text(fleet)
    before = {path for path in base.rglob("*")}
    blocked = {"RAY_ADDRESS": "no:1", "NO_PROXY": "*"}
    done = subprocess.run(
        command("--config", str(run_file), "--gpus", "4", "--plan", "--json"),
        env={**os.environ, "PYTHONPATH": str(ROOT), **blocked},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["trainer"]["cuda_visible_devices"] == "0,1"
    assert plan["service"]["cuda_visible_devices"] == "2,3"
    assert plan["service"]["engines"] == [{"group": "eval", "number": 0, "gpus": ["2", "3"]}]
    assert plan["plan"] == "points at steps 0, 2, 4 (final)"
    assert {path for path in base.rglob("*")} == before


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
