"""Looking at real processes, and waiting with a deadline for what they do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

import psutil


def tree(pid: int) -> list[psutil.Process]:
    """A process and everything below it, now."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; a zombie does not."""
    left = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
    return left


def eventually(condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    """Return once it holds.

    Raises:
        AssertionError: it did not in time.
    """
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"not within {timeout_s:g} s"
        time.sleep(0.02)


def assert_gone(processes: Iterable[psutil.Process], *, timeout_s: float = 30.0) -> None:
    """None of them lives any more."""
    watched = list(processes)
    eventually(lambda: not alive(watched), timeout_s=timeout_s)
