"""A callback under data parallelism: two real ranks, one of which acts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stub_service import StubService

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(300)
def test_under_ddp_rank_0_alone_exports_and_talks_to_the_service(
    stub: StubService, tiny_model_dir: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += [str(ROOT / "tests/support/hf_ranks.py"), str(tiny_model_dir), str(tmp_path), stub.url]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert stub.steps() == [0, 2, 3]
    assert len(stub.points) == 3
    assert [call for call, _ in stub.calls].count("PUT /runs/r") == 1
    assert "rank 0: receipt True" in done.stdout
    assert "rank 1: receipt False" in done.stdout
    assert sorted(path.name.partition("-")[0] for path in (tmp_path / "r").glob("step_*")) == [
        "step_0",
        "step_2",
        "step_3",
    ]
