"""SIGTERM as a wish: the step under way is completed, the run is drained, then it ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_CODE = 128 + signal.SIGTERM
SAME_WISH_S = 2.0


class Stopped(Exception):
    """A wait was cut short because the run is to end."""


class StopFlag:
    """Whether the run was asked to end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked_at = 0.0
        self.is_set = False
        self.cuts_waits = True  # until the drain, whose waiting is what a stop asks for

    def sleep(self, seconds: float) -> None:
        """As `time.sleep`, for waits that a stop cuts short.

        Raises:
            Stopped: the run is to end.
        """
        if self.is_set and self.cuts_waits:
            raise Stopped
        time.sleep(seconds)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Answer the first SIGTERM with the flag, and a second one with the default (death).

        Who ends a whole job sends it to the launcher, to torchrun and to the ranks, and the former pass it on: what
        comes within `SAME_WISH_S` of the first is the same wish.
        """

        def handle(number: int, _: object) -> None:
            now = self._clock()
            if not self.is_set:
                self.is_set, self._asked_at = True, now
            elif now - self._asked_at > SAME_WISH_S:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)

        before = signal.signal(signal.SIGTERM, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
