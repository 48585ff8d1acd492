"""The two parts that a launch starts, and whatever they leave behind.

This process adopts orphans, so all that a part ever started stays below it and can be found, in whatever session; each
part's processes carry its name in their environment. A part ends with this process, also when that is killed
(PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from eval_service.orphans import alive

MARK = "EVALFLEET_LAUNCH_PART"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def environment() -> dict[str, str]:
    """Ours, so that a child finds this package wherever it is started, and its environment can be read."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "SPT_NOENV": "1"}


@dataclass(frozen=True, slots=True)
class Part:
    """A child in a session of its own: a Ctrl-C on the terminal reaches this process alone."""

    name: str
    process: subprocess.Popen[bytes]

    @classmethod
    def start(
        cls, name: str, arguments: Sequence[str], *, env: Mapping[str, str], output: IO[bytes] | None = None
    ) -> Part:
        """Start a Python module; its output is ours unless a file is given."""
        parent = os.getpid()

        def dies_with_us() -> None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env={**environment(), **env, MARK: name},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            start_new_session=True,
            preexec_fn=dies_with_us,  # noqa: PLW1509 - this program has one thread when it starts a part
        )
        return cls(name, process)

    @property
    def running(self) -> bool:
        """Whether its first process has not ended."""
        return self.process.poll() is None

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False when the time is up."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        return not self.running

    def send(self, number: signal.Signals) -> None:
        """Send its first process a signal."""
        if self.running:
            self.process.send_signal(number)

    def children(self) -> list[psutil.Process]:
        """What its first process has started itself."""
        with suppress(psutil.Error):
            return [child for child in psutil.Process(self.process.pid).children() if alive(child)]
        return []

    def left(self) -> list[psutil.Process]:
        """All of its processes but the first."""
        below = psutil.Process().children(recursive=True)
        return [child for child in below if child.pid != self.process.pid and alive(child) and self._owns(child)]

    def _owns(self, process: psutil.Process) -> bool:
        try:
            return bool(process.environ().get(MARK) == self.name)
        except (psutil.Error, OSError):
            return False


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to all of them; psutil sees to it that none is another's by now."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)
