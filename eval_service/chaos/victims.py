"""The processes of the service under test, by what they are. Only what carries the family's mark is ever touched."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import psutil

from eval_service.demo.processes import Family

_SEEN_S = 3.0
_LOOK_S = 0.05
_GONE = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class Part(StrEnum):
    """A part of the service, and how its command line tells it."""

    CONTROLLER = "ServeReplica:evalfleet:controller"
    GATEWAY = "ServeReplica:evalfleet:gateway"
    PROXY = "ServeReplica:evalfleet:proxy"
    REPLICA = "ServeReplica:evalfleet:engines-"
    SUPERVISOR = "engine/supervisor.py"
    ENGINE = "eval_service.engine.fake"
    TRAINER = "eval_service.chaos.trainer"


@dataclass(slots=True)
class Victims:
    """Finds them, signals them, and sees that the signal landed."""

    family: Family
    stopped: list[psutil.Process] = field(default_factory=list)

    def find(self, part: Part) -> list[psutil.Process]:
        """The living processes of a part, oldest first."""
        found = [process for process in self.family.members() if part in _command(process) and alive(process)]
        return sorted(found, key=_began_at)

    def kill(self, process: psutil.Process) -> bool:
        """SIGKILL; whether it is seen to be gone."""
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
        return _wait(lambda: not alive(process))

    def stop(self, process: psutil.Process) -> bool:
        """SIGSTOP; whether it is seen to be stopped."""
        with suppress(psutil.Error):
            process.send_signal(signal.SIGSTOP)
            self.stopped.append(process)
        return _wait(lambda: _status(process) == psutil.STATUS_STOPPED)

    def go_on(self, process: psutil.Process) -> None:
        """SIGCONT, if it is still there."""
        with suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)
        if process in self.stopped:
            self.stopped.remove(process)

    def release(self) -> None:
        """Let everything go on that was stopped."""
        for process in list(self.stopped):
            self.go_on(process)


def alive(process: psutil.Process) -> bool:
    """Whether it runs, or is stopped; one that nobody has reaped yet is gone."""
    return _status(process) not in (None, *_GONE) and bool(process.is_running())


def replica_of(process: psutil.Process) -> int | None:
    """The engine's replica that a supervisor or a server is of, or that it is itself; None: it is gone, or of none."""
    with suppress(psutil.Error):
        found = [one.pid for one in (process, *process.parents()) if Part.REPLICA in _command(one)]
        return found[0] if found else None
    return None


def holders(lock: Path) -> set[int]:
    """The processes that hold a lock on a file, as the kernel has it."""
    try:
        inode = str(lock.stat().st_ino)
    except FileNotFoundError:
        return set()
    rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return {int(row[4]) for row in rows if row[1] == "FLOCK" and row[5].rpartition(":")[2] == inode}


def _status(process: psutil.Process) -> str | None:
    try:
        return str(process.status())
    except psutil.Error:
        return None


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _began_at(process: psutil.Process) -> float:
    try:
        return float(process.create_time())
    except psutil.Error:
        return float("inf")


def _wait(seen: Callable[[], bool]) -> bool:
    until = time.monotonic() + _SEEN_S
    while not seen():
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_S)
    return True


def pids(processes: list[psutil.Process]) -> set[int]:
    """Their ids."""
    return {process.pid for process in processes if process.pid != os.getpid()}
