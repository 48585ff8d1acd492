"""When exchanges are to end: one timer for all of them, since one each costs as much as a tenth of a whole request.

An exchange is ended at its time or up to `TICK_S` later, never earlier.
"""

from __future__ import annotations

import asyncio

from router.exchange import Exchange

TICK_S = 0.05


class Deadlines:
    """Those of one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: dict[int, set[Exchange]] = {}
        self._next: asyncio.TimerHandle | None = None

    def set(self, exchange: Exchange, after_s: float) -> int:
        """End it after so long; what `clear` takes to prevent that."""
        tick = int((self._loop.time() + after_s) / TICK_S) + 1
        due = self._due.get(tick)
        if due is None:
            due = self._due[tick] = set()
            self._wake()
        due.add(exchange)
        return tick

    def clear(self, exchange: Exchange, tick: int) -> None:
        """It has ended."""
        due = self._due.get(tick)
        if due is not None:
            due.discard(exchange)

    def close(self) -> None:
        """End nothing any more."""
        if self._next is not None:
            self._next.cancel()

    def _wake(self) -> None:
        if self._next is None:
            self._next = self._loop.call_later(TICK_S, self._look)

    def _look(self) -> None:
        self._next = None
        now = int(self._loop.time() / TICK_S)
        for tick in [tick for tick, due in self._due.items() if tick <= now or not due]:
            for exchange in self._due.pop(tick):
                exchange.expire()
        if self._due:
            self._wake()
