"""Output tokens per second of each engine, over the last seconds, from the answers that came in.

Invariant: only answers to the controller's own requests count, those of points and of judges; what people and lm-eval
ask through the proxy does not.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

WINDOW_S = 10.0
_BIN_S = 0.5


class Throughput:
    """Counts answers' tokens; an answer's tokens are all of its end's moment. The clock is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._bins: defaultdict[str, deque[tuple[float, int]]] = defaultdict(deque)

    def note(self, engine: str, tokens: int) -> None:
        """An engine has answered so many."""
        bins, now = self._bins[engine], self._clock()
        if bins and now - bins[-1][0] < _BIN_S:
            bins[-1] = (bins[-1][0], bins[-1][1] + tokens)
        else:
            bins.append((now, tokens))

    def per_s(self, engine: str) -> float:
        """Tokens per second of the window; 0 for one that has answered nothing in it."""
        bins = self._bins.get(engine)
        if bins is None:
            return 0.0
        since = self._clock() - WINDOW_S
        while bins and bins[0][0] < since:
            bins.popleft()
        if not bins:
            del self._bins[engine]
        return round(sum(tokens for _, tokens in bins) / WINDOW_S, 1)
