"""The demo itself, on real parts, with a shorter plan; named to run before the tier's shared service is started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from eval_service.contract.names import parse_step_dir
from eval_service.demo.plan import DemoOptions, Plan
from eval_service.demo.run import run_demo

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

SHORT = Plan(num_steps=240, interval=40)
TEST_MARK = "EVALFLEET_TEST_NONCE"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for both tests: the second finds what the first left."""
    return tmp_path_factory.mktemp("demo") / "out"


@pytest.fixture
def nonce(monkeypatch: pytest.MonkeyPatch) -> str:
    """In the environment of everything that a test starts."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(TEST_MARK, value)
    return value


def living(nonce: str) -> Iterator[str]:
    """Processes that carry the mark."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(TEST_MARK) == nonce:
                yield f"{process.pid} {' '.join(process.cmdline())[:200]}"


def test_a_demo_that_is_stopped_ends_everything_that_it_started(out: Path, nonce: str) -> None:
    command = [sys.executable, "-m", "eval_service.cli.main", "demo", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith("waiting for 2 SGLang engines"):
                break
        assert list(living(nonce))
        demo.send_signal(signal.SIGTERM)
        rest = demo.stdout.read()
    assert "ending what was started" in rest
    assert demo.returncode == 130
    assert list(living(nonce)) == []


def test_the_demo_shows_a_model_that_learns_while_it_is_evaluated_and_loses_nothing_to_a_kill(
    out: Path, nonce: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_demo(DemoOptions(out=out, as_json=True), SHORT)
    report = json.loads(capsys.readouterr().out)
    assert [check for check in report["checks"] if not check["ok"]] == []
    assert code == 0
    assert report == json.loads((out / "report.json").read_text())
    assert [point["step"] for point in report["points"]] == list(SHORT.steps)
    assert report["kill"]["samples_from_others"] > 0
    kept = {found.step for name in report["snapshots_kept"] if (found := parse_step_dir(name)) is not None}
    # In the order of their ends: a point whose engine was killed may end after the next one.
    exported = sorted(report["points"][1:], key=lambda point: point["ended_at"])
    assert kept >= {point["step"] for point in exported[-SHORT.keep :]}
    # The best stays beside the last ones, and so does what an engine held when the service was ended.
    assert len(kept) <= SHORT.keep + 1 + SHORT.engines < len(SHORT.steps) - 1
    assert (out / "curve.png").stat().st_size > 0
    assert "<svg" in (out / "curve.html").read_text()
    assert list(living(nonce)) == []
