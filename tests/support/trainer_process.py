"""Runs `evalfleet-train` as a process, and reads what it did from its step log."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.zygote import Zygote
from trainer.crash import VARIABLE
from trainer.steplog import read_steplog

TIMEOUT_S = 100.0
TORCHRUN_S = 280.0  # three processes import torch and megatron-core


@dataclass(frozen=True, slots=True)
class Ended:
    """How a launch ended; a signal's number is negative."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class TrainerRuns:
    """Launches of one run, one after another, against one service."""

    zygote: Zygote
    directory: Path
    model: Path
    data: Path
    url: str
    run: str = "tiny"

    def __post_init__(self) -> None:
        evaluation = f'[eval]\nurl = "{self.url}"\ninterval = 2\nsuites = ["main"]\ndrain_timeout_s = 30\n'
        self.config.write_text(
            f'[run]\nname = "{self.run}"\nroot = "root"\n[model]\nhf_path = "{self.model}"\n'
            f'[data]\ntrain = "{self.data}"\nmax_length = 64\n'
            "[train]\nnum_steps = 4\nglobal_batch_size = 4\nmicro_batch_size = 2\nlr = 1e-3\nthreads = 1\n" + evaluation
        )

    @property
    def config(self) -> Path:
        """The run file."""
        return self.directory / "run.toml"

    @property
    def run_dir(self) -> Path:
        """Where snapshots and the outbox are."""
        return self.directory / "root" / self.run

    @property
    def output_dir(self) -> Path:
        """Where the log, the plan and the receipt are."""
        return self.run_dir / "trainer"

    def launch(self, *settings: str, crash: str | None = None, plan: bool = False) -> Ended:
        """Run the trainer to its end, with `section.key=value` settings."""
        argv = ["--config", str(self.config)]
        argv += ["--plan"] if plan else []
        for setting in settings:
            argv += ["--set", setting]
        stdout, stderr = self.directory / "stdout.txt", self.directory / "stderr.txt"
        code = self.zygote.launch(argv, {VARIABLE: crash or ""}, stdout, stderr, TIMEOUT_S)
        return Ended(code, stdout.read_text(), stderr.read_text())

    def torchrun(self, *settings: str, ranks: int, crash: str = "") -> Ended:
        """Run the trainer over several ranks under torchrun, as a launch does."""
        sets = [part for setting in settings for part in ("--set", setting)]
        command = [
            sys.executable,
            "-m",
            "trainer.ranks",
            f"--nproc-per-node={ranks}",
            "--standalone",
            "--local-addr=127.0.0.1",
        ]
        command += ["-m", "trainer.main", "--config", str(self.config), *sets]
        env = {**os.environ, VARIABLE: crash, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=env, cwd=self.directory, **pipes) as process:
            try:
                stdout, stderr = process.communicate(timeout=TORCHRUN_S)
            except BaseException:
                for part in [*psutil.Process(process.pid).children(recursive=True), process]:
                    part.kill()
                raise
        return Ended(process.returncode, stdout, stderr)

    def log(self) -> list[dict[str, Any]]:
        """Every event so far."""
        return read_steplog(self.output_dir / "steps.jsonl")

    def events(self, *names: str) -> list[str]:
        """`name:step` of the named events, oldest first (no step: the name alone)."""
        return [
            f"{entry['event']}:{entry['step']}" if "step" in entry else entry["event"]
            for entry in self.log()
            if entry["event"] in names
        ]

    def snapshots(self) -> list[Path]:
        """Published snapshots, by step."""
        return sorted(self.run_dir.glob("step_*"), key=lambda path: int(path.name.split("_")[1].split("-")[0]))
