"""A wait that a signal's handler ends."""

from __future__ import annotations

import queue
from contextlib import suppress


class Wake:
    """No event: its lock may be held by the very thread that a signal interrupts, and the handler waits for itself."""

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        """End a wait, the one under way or the next; also from a signal's handler."""
        self._rings.put(None)

    def wait(self, seconds: float | None = None) -> None:
        """Wait for a ring, or so long."""
        with suppress(queue.Empty):
            self._rings.get(timeout=seconds)
