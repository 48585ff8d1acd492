"""Which engine may be spoiled now: what is done to engines must not make a sound snapshot look like a bad one.

A pin has two tries, and then one or two proofs, each after the engine was started anew (controller/pinning.py). What is
done to an engine ends with its process, so one fault spoils the tries or one proof. To see a bad snapshot takes two
refusals or two of other weights, before and after a start, or three boots that each fail. So, while an attempt is open
that may have felt what was done to an engine, that engine is not given one of those two kinds again, nor a third of any
kind. An attempt ends with all of its pins, under whatever controller; how long it takes is the service's, so who waits
for an engine does so with a deadline of its own (inject.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from eval_service.chaos.faults import TWICE_LOOKS_BAD, FaultKind

MOST = 2


@dataclass(slots=True, eq=False)
class Spoiling:
    """One fault, as it was given to one engine.

    Attributes:
        replica: the engine's, whatever its server is now.
        over: whether it can do nothing any more.
        felt: asked when it is over: whether it did anything.
        open: attempts that may have felt it and have not ended; None: it is not over.
    """

    kind: FaultKind
    replica: int
    over: Callable[[], bool]
    felt: Callable[[], bool] = lambda: True
    open: frozenset[tuple[str, int]] | None = None


@dataclass(slots=True)
class Sparing:
    """What was given to whom, for all threads that give.

    Args:
        open_attempts: of the ledger; None where that can't be told now.
    """

    open_attempts: Callable[[], frozenset[tuple[str, int]] | None]
    _given: list[Spoiling] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def grant(self, spoiling: Spoiling) -> bool:
        """Whether the engine may be given this; then it counts, until nobody is left who felt it."""
        with self._lock:
            self._forget()
            kinds = [one.kind for one in self._given if one.replica == spoiling.replica]
            again = spoiling.kind in kinds and spoiling.kind in TWICE_LOOKS_BAD
            granted = len(kinds) < MOST and not again
            if granted:
                self._given.append(spoiling)
            return granted

    def _forget(self) -> None:
        over = [one for one in self._given if one.open is None and one.over()]
        attempts = self.open_attempts()  # after that: who felt it is among these, or has ended
        if attempts is None:
            return
        for one in over:
            one.open = attempts if one.felt() else frozenset()
        for one in self._given:
            one.open = None if one.open is None else one.open & attempts
        self._given = [one for one in self._given if one.open is None or one.open]
