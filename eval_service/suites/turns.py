"""Whose samples a scorer process gets next.

So many may be at work at once. The caller with the fewest at work goes first; of those, the one served longest ago. One
that has given no score for `STUCK_S` no longer counts: callers that have nothing at work go on beside it, in at most
`SPARE` processes more. So a scorer that hangs delays only itself.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

STUCK_S = 10.0  # a process may take some of them to start
SPARE = 4
_LOOK_S = 0.5


@dataclass(slots=True, eq=False)
class Caller:
    """One that has samples scored. `heard_at` (monotonic) is when it got the last score, `left` that it wants no more.

    Both are set across threads.
    """

    at_work: int = 0
    served: int = 0
    heard_at: float = field(default_factory=time.monotonic)
    left: bool = False

    def heard(self) -> None:
        """A score came."""
        self.heard_at = time.monotonic()


class Turns:
    """Gives turns, on one event loop."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._waiting: dict[asyncio.Future[None], Caller] = {}
        self._at_work: list[Caller] = []  # once for each turn
        self._given = 0
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, caller: Caller) -> None:
        """Wait for a turn, which `give_back` ends."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = caller
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.pop(turn, None)
            if turn.done() and not turn.cancelled():
                self.give_back(caller)
            raise

    def give_back(self, caller: Caller) -> None:
        """A turn is over."""
        caller.at_work -= 1
        self._at_work.remove(caller)
        self._give()

    def _give(self) -> None:
        while (turn := self._next()) is not None:
            caller = self._waiting.pop(turn)
            self._given += 1
            caller.at_work, caller.served = caller.at_work + 1, self._given
            caller.heard()
            self._at_work.append(caller)
            turn.set_result(None)
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        self._give()

    def _next(self) -> asyncio.Future[None] | None:
        now = time.monotonic()
        busy, lively = len(self._at_work), sum(now - caller.heard_at < STUCK_S for caller in self._at_work)
        if lively >= self._processes or busy >= self._processes + SPARE:
            return None
        # Who was cancelled leaves `_waiting` only when its task runs again.
        able = [
            turn
            for turn, caller in self._waiting.items()
            if not turn.done() and (busy < self._processes or not caller.at_work)
        ]
        return min(able, key=lambda turn: (self._waiting[turn].at_work, self._waiting[turn].served), default=None)
