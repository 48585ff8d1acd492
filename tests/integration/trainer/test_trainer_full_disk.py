"""A disk that fills up in the middle of an export, for real: a file system of one and a half snapshots."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from eval_service.contract.states import PointState, Reason
from tests.support.stub_service import StubService
from tests.support.trainer_process import TrainerRuns

ROOT = Path(__file__).parents[3]


def test_a_full_disk_in_an_export_kills_no_long_run(runs: TrainerRuns, stub: StubService, tmp_path: Path) -> None:
    """ENOSPC mid-export kills a long run: three points, room for one; training ends well, partial directories go."""
    weights = sum(path.stat().st_size for path in runs.model.glob("*") if path.is_file())
    (tmp_path / "root").mkdir()
    sets = ["train.num_steps=6", "eval.skip_eval_before_train=true", f"train.save_dir={tmp_path / 'saves'}"]
    sets += [f"run.output_dir={tmp_path / 'out'}", "eval.max_in_flight=9"]
    trainer = [sys.executable, "-m", "trainer.main", "--config", str(runs.config)]
    trainer += [part for each in sets for part in ("--set", each)]
    script = (
        f"mount -t tmpfs -o size={weights * 3 // 2} none {shlex.quote(str(tmp_path / 'root'))} || exit 99\n"
        f"{shlex.join(trainer)}; code=$?\n"
        f"ls -A {shlex.quote(str(runs.run_dir))} > {shlex.quote(str(tmp_path / 'left'))}\n"
        "exit $code\n"
    )
    # A mount of its own, gone with the process.
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip("this machine allows no mounts of one's own")
    assert done.returncode == 0, done.stderr
    assert [(point.step, point.state, point.reason) for point in stub.points] == [
        (2, PointState.DONE, None),
        (4, PointState.SKIPPED, Reason.EXPORT_FAILED),
        (6, PointState.SKIPPED, Reason.EXPORT_FAILED),
    ]
    assert "No space left" in (stub.point(4).detail or "")
    left = (tmp_path / "left").read_text().split()
    assert [name.partition("-")[0] for name in left if name != "outbox"] == ["step_2"]
