"""Work that lies about while somebody could do it: an engine that stands idle beside a point that may have it, and a
point under way that gets nowhere. A pure account of what the ledger shows from one look to the next.

Invariant: only time during which a controller acted counts, and only while nothing about the two changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

IDLE_S = 20.0
"""An engine that is free, and a queued point whose snapshot is admitted, both all this time."""
UNSERVED_S = 60.0
"""A point under way that has no engine and does not come to its end, while an engine is free."""
STUCK_S = 180.0
"""One attempt, whatever befalls its engines."""
_SILENT_S = 3.0
_LIMITS = {"unserved": (UNSERVED_S, "had no engine, and one was free,"), "attempt": (STUCK_S, "went on")}


@dataclass(frozen=True, slots=True)
class Moment:
    """What is shown at a Unix time.

    Attributes:
        shown_at: when the controller last showed itself.
        free: engines that could be leased, each with its boot.
        leased: points that have an engine.
        queued: points that may have one, each with its attempts so far.
        under_way: points that have begun, each with its attempt and state.
    """

    at: float
    epoch: int
    shown_at: float
    free: frozenset[str] = frozenset()
    leased: frozenset[str] = frozenset()
    queued: frozenset[tuple[str, int]] = frozenset()
    under_way: frozenset[tuple[str, int, str]] = frozenset()


@dataclass(slots=True)
class Idleness:
    """Since when what is so has been so; `told` is what has been so for too long, by whom it befell."""

    told: dict[str, str] = field(default_factory=dict)
    longest_s: float = 0.0  # that an engine was idle beside a queued point
    _since: dict[tuple[str, ...], float] = field(default_factory=dict)
    _epoch: int = -1

    def look(self, now: Moment) -> None:
        """Take in one more look."""
        if now.at - now.shown_at > _SILENT_S or now.epoch != self._epoch:
            self._epoch = now.epoch
            self._since = {}
        self._since = {key: self._since.get(key, now.at) for key in _shown(now)}
        self._tell_idle(now)
        for (what, point, *rest), since in self._since.items():
            if what in _LIMITS and now.at - since > _LIMITS[what][0]:
                told = f"attempt {rest[0]} at {point} {_LIMITS[what][1]} for {now.at - since:.0f} s"
                self.told[f"{what} {point} {rest[0]}"] = told

    def _tell_idle(self, now: Moment) -> None:
        engines = {key[1]: at for key, at in self._since.items() if key[0] == "free"}
        points = {key[1]: at for key, at in self._since.items() if key[0] == "queued"}
        if not engines or not points:
            return
        engine, point = min(engines, key=engines.__getitem__), min(points, key=points.__getitem__)
        lasted_s = now.at - max(engines[engine], points[point])
        self.longest_s = max(self.longest_s, lasted_s)
        if lasted_s > IDLE_S:
            self.told[f"{engine} {point}"] = f"{engine} was idle for {lasted_s:.0f} s while {point} was queued"


def _shown(now: Moment) -> Iterator[tuple[str, ...]]:
    """Everything that is so, each thing with its kind."""
    yield from (("free", engine) for engine in now.free)
    yield from (("queued", point, str(attempts)) for point, attempts in now.queued)
    for point, attempt, state in now.under_way:
        yield "attempt", point, str(attempt)
        if now.free and point not in now.leased:
            yield "unserved", point, str(attempt), state
