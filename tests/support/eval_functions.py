"""Checkpoint eval functions that do what their options say; each leaves notes in a directory."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from eval_service.functions import EvalContext, EvalSkip


class Noting:
    """Evaluates by the step: 7 is skipped, 8 raises, 9 hangs with a child of its own."""

    def __init__(self, notes: str) -> None:
        self._notes = Path(notes)
        self._note("made", os.getpid())

    def evaluate_checkpoint(self, snapshot_dir: Path, context: EvalContext) -> None:
        """One checkpoint."""
        assert (snapshot_dir / "manifest.json").is_file()
        if context.step == 7:
            raise EvalSkip("its benchmark needs 8 GPUs")
        if context.step == 8:
            raise RuntimeError("the backend said no")
        if context.step == 9:
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            self._note("child", child.pid)
            time.sleep(600)
        context.pinned(f"mine.{context.step}", "canary")
        context.sample(prompt="p", output="right", answer="right", score=1.0)
        context.sample(prompt="q", output="wrong", answer="right", score=0.0)
        context.metric("accuracy", 0.5, n=2, stderr=0.5)
        self._note("evaluated", context.step)

    def dispose(self) -> None:
        """The end."""
        self._note("disposed", os.getpid())

    def _note(self, what: str, number: int) -> None:
        with (self._notes / what).open("a") as file:
            file.write(f"{number}\n")


class Trains(Noting):
    """What trains is refused."""

    def train_step(self) -> None:
        """One step."""
