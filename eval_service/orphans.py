"""What this process has started, and what that has started: found in whatever session, and ended whole.

Once `adopt` was called (PR_SET_CHILD_SUBREAPER) nothing leaves: what loses its parent becomes this process's own child.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Collection, Iterable
from contextlib import suppress

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.05
_KILLS = 4
_KILL_S = 2.0


def adopt() -> None:
    """Become the parent of what loses its own, from now on."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def bury(parts: Collection[int]) -> None:
    """Reap what was adopted and has ended, so that a long run gathers no zombies; the parts themselves are Popen's."""
    with suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in parts:  # the kernel names it first until it is reaped, which may be never
                _bury_others(parts)
                return
            os.waitpid(ended.si_pid, 0)


def _bury_others(parts: Collection[int]) -> None:
    for child in psutil.Process().children():
        if child.pid not in parts:
            with suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)


def alive(process: psutil.Process) -> bool:
    """Whether it is there, and no zombie; one with a thread that has not ended yet still has its files and locks."""
    try:
        ended = process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
        return bool(process.is_running() and not ended)
    except psutil.Error:
        return False


def below() -> list[psutil.Process]:
    """All that live below this process."""
    return [process for process in psutil.Process().children(recursive=True) if alive(process)]


def end_below(linger_s: float) -> None:
    """Wait until nothing lives below this process, and reap it; what has not ended by itself in time is killed.

    What is in this process's own group is killed at once: the helpers of what ends here, which wait for one another.
    """
    _kill([process for process in below() if _group(process) == os.getpgrp()])
    for _ in range(_KILLS):  # and what one of them starts while it is being killed
        if _none_below(linger_s):
            return
        _kill(below())
        linger_s = _KILL_S


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def _group(process: psutil.Process) -> int | None:
    with suppress(ProcessLookupError):
        return os.getpgid(process.pid)
    return None


def _none_below(timeout_s: float) -> bool:
    until = time.monotonic() + timeout_s
    while True:
        bury(())  # a raylet that has ended lives, for its workers, until it is reaped
        if not below():
            return True
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_S)
