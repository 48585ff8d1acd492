"""Several transfers at a time, in threads that no process waits for when it ends, as it would for an executor's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable


def abreast(parts: Iterable[Callable[[], object]], parallel: int, stop: threading.Event, *, name: str) -> None:
    """Run the parts, so many at a time; returns once those that were begun have ended.

    Args:
        stop: set at the first failure, or when whoever waits is interrupted; then no further part begins.

    Raises:
        What the first part that failed raised.
    """
    waiting = deque(parts)
    failures: list[Exception] = []

    def work() -> None:
        while not stop.is_set():
            try:
                part = waiting.popleft()
            except IndexError:
                return
            try:
                part()
            except Exception as exc:  # noqa: BLE001 - a thread's edge: it is raised where it is waited for
                failures.append(exc)
                stop.set()

    threads = [threading.Thread(target=work, name=name, daemon=True) for _ in range(min(parallel, len(waiting)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stop.set()
    if failures:
        raise failures[0]
