"""Token buckets by name: so many requests a second, and as many at once as come together in `burst_s` seconds."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MOST_NAMES = 4096  # beyond that whoever has asked for nothing for the longest is forgotten


class Rates:
    """For one event loop. `per_s` 0: without a bound."""

    def __init__(self, per_s: float, *, burst_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._most = max(1.0, per_s * burst_s)
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # how many, and when that was so

    def take(self, name: str) -> float:
        """Take one; how many seconds to wait before the next try, 0 where there was one."""
        if not self._per_s:
            return 0.0
        now = self._clock()
        left, at = self._left.pop(name, (self._most, now))
        left = min(self._most, left + (now - at) * self._per_s)
        wait_s = 0.0 if left >= 1.0 else (1.0 - left) / self._per_s
        self._left[name] = (left - 1.0 if not wait_s else left, now)
        if len(self._left) > MOST_NAMES:
            self._left.popitem(last=False)
        return wait_s
