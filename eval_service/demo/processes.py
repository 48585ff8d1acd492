"""The demo's child processes, and the proof that none is left.

Every child inherits a mark (a nonce in its environment), and so does everything that it starts, in whatever session
or process group; what carries the mark is ours to end, and nothing else is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import eval_service
from eval_service.contract.errors import EvalfleetError

MARK = "EVALFLEET_DEMO_NONCE"
TAIL_LINES = 15
LOOK_S = 0.1


class DemoError(EvalfleetError):
    """The demo could not go on; the message says where, and carries the end of the log."""

    code = "demo_failed"


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does: by way of every `finally`, so that what was started is ended too."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(slots=True)
class Child:
    """A process with a session and a log of its own."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self.process.poll() is None

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False when the time is up."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, grace_s: float) -> bool:
        """SIGTERM, then SIGKILL to its group after a grace time; whether it ended by itself."""
        if not self.running:
            return True
        self.process.terminate()
        if self.wait(grace_s):
            return True
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return False

    def tail(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])

    def must_run(self) -> None:
        """Raise DemoError if it has ended."""
        if not self.running:
            raise DemoError(f"{self.name} ended with code {self.process.returncode}; {self.log} ends:\n{self.tail()}")


@dataclass(slots=True)
class Family:
    """Every process of one demo."""

    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)
    children: list[Child] = field(default_factory=list)

    def start(
        self, name: str, arguments: Sequence[str], *, log: Path, cwd: Path, env: Mapping[str, str] | None = None
    ) -> Child:
        """Start a Python module of this installation with the interpreter that runs us; `env` is laid over ours."""
        with log.open("ab") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=cwd,
                env=self._environment() | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        child = Child(name, process, log)
        self.children.append(child)
        return child

    def owns(self, pid: int) -> bool:
        """Whether a process is one of ours."""
        try:
            return bool(psutil.Process(pid).environ().get(MARK) == self.nonce)
        except (psutil.Error, OSError):
            return False

    def members(self) -> list[psutil.Process]:
        """All that live now."""
        return [process for process in psutil.process_iter() if process.pid != os.getpid() and self.owns(process.pid)]

    def end(self, *, grace_s: float = 90.0, linger_s: float = 15.0) -> list[str]:
        """End everything, the youngest child first; return what did not end in order and had to be killed."""
        left = [child.name for child in reversed(self.children) if not child.stop(grace_s)]
        for process in self._linger(linger_s):
            left.append(_describe(process))
            _kill(process)
        self._linger(linger_s)
        return left

    def _linger(self, timeout_s: float) -> list[psutil.Process]:
        # What has ended but is not reaped (a container without an init) has no environment, and so counts as gone.
        deadline = time.monotonic() + timeout_s
        while (alive := self.members()) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return alive

    def _environment(self) -> dict[str, str]:
        root = str(Path(eval_service.__file__).parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        ours = {
            MARK: self.nonce,
            # Libraries that set a process's title would overwrite the environment that the mark is read from.
            "SPT_NOENV": "1",
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return os.environ | ours


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return str(process.pid)


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
