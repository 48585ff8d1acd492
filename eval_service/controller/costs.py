"""What a pin costs and what an engine gets done, as measured here: how many engines are worth their pins.

An engine more pays as long as those that are there would take longer over the unsent samples than a pin takes.
"""

from __future__ import annotations

import math

_WEIGHT = 0.2  # of the newest measurement


class Costs:
    """Moving averages over all lanes of a controller.

    Args:
        server_concurrency: requests in flight per engine.
    """

    def __init__(self, server_concurrency: int) -> None:
        self._slots = server_concurrency
        self._pin_s: float | None = None
        self._sample_s: dict[str, float] = {}

    @property
    def pin_s(self) -> float | None:
        """Seconds of a pin that was proven; None: there was none yet."""
        return self._pin_s

    def note_pin(self, seconds: float) -> None:
        """A pin was proven after so long."""
        self._pin_s = _averaged(self._pin_s, seconds)

    def note_sample(self, suite: str, seconds: float) -> None:
        """A sample of a suite came back after so long on an engine."""
        self._sample_s[suite] = _averaged(self._sample_s.get(suite), seconds)

    def engines_for(self, suite: str, unsent: int) -> int:
        """How many engines so many unsent samples are worth, at least one if there are any.

        While nothing is measured, as many as they fill.
        """
        filled = -(-unsent // self._slots)
        sample_s = self._sample_s.get(suite)
        if sample_s is None or self._pin_s is None or not unsent:
            return filled
        one_engine_s = unsent * sample_s / self._slots
        return max(1, min(unsent, math.ceil(one_engine_s / max(self._pin_s, 1e-3))))


def _averaged(before: float | None, now: float) -> float:
    return now if before is None else before + _WEIGHT * (now - before)
