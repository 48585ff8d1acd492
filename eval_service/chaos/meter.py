"""What the service's processes use over the time: memory of their own (USS) and open files, one series a process.

Invariant: a process counts from the time at which it is warm on: what it imports and caches first is no leak. One that
did not live for long enough afterwards says nothing.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby

import psutil

from eval_service.chaos.victims import Part, Victims

_LEAST_LOOKS = 8
_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Look:
    """One process at one time, in seconds of the soak; `uss_bytes` is what would be free without it."""

    at_s: float
    uss_bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class Growth:
    """A process over its warm life."""

    lived_s: float
    first_mb: float
    last_mb: float
    mb_per_min: float
    files_first: int
    files_last: int
    each_min_mb: tuple[float, ...]  # a line may be steep that bends


def growth(looks: Sequence[Look], *, warm_at_s: float, warm_up_s: float, least_s: float) -> Growth | None:
    """How a process grew, by the straight line through its looks.

    Args:
        looks: of one process, oldest first.
        warm_at_s: nothing counts before.
        warm_up_s: nor so soon after the process was first seen.
        least_s: a shorter life than that says nothing: None.
    """
    since = max(warm_at_s, looks[0].at_s + warm_up_s) if looks else 0.0
    warm = [look for look in looks if look.at_s >= since]
    if len(warm) < _LEAST_LOOKS or warm[-1].at_s - warm[0].at_s < least_s:
        return None
    times, sizes = [look.at_s / 60 for look in warm], [look.uss_bytes / _MB for look in warm]
    slope = statistics.linear_regression(times, sizes).slope
    share = max(1, len(warm) // 4)
    first, last = warm[:share], warm[-share:]
    return Growth(
        lived_s=round(warm[-1].at_s - warm[0].at_s, 1),
        first_mb=round(statistics.median(look.uss_bytes for look in first) / _MB, 1),
        last_mb=round(statistics.median(look.uss_bytes for look in last) / _MB, 1),
        mb_per_min=round(slope, 3),
        # The fewest: requests in flight come and go, what stays open stays.
        files_first=min(look.files for look in first),
        files_last=min(look.files for look in last),
        each_min_mb=tuple(_by_minute(warm)),
    )


def _by_minute(looks: Sequence[Look]) -> Iterator[float]:
    minutes = groupby(looks, key=lambda look: (look.at_s - looks[0].at_s) // 60)
    for _, of_it in minutes:
        yield round(statistics.median(look.uss_bytes for look in of_it) / _MB, 1)


@dataclass(slots=True)
class Meter:
    """A thread that looks at the processes of some parts."""

    victims: Victims
    parts: Mapping[str, Part]
    period_s: float
    series: dict[tuple[str, int, float], list[Look]] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)
    _ending: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin."""
        self._thread = threading.Thread(target=self._live, name="meter", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Look no more."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(30.0)

    def grown(self, *, warm_at_s: float, warm_up_s: float, least_s: float) -> dict[str, list[Growth]]:
        """The growth of each process that lived for long enough, by part."""
        found: dict[str, list[Growth]] = {name: [] for name in self.parts}
        for (name, _, _), looks in self.series.items():
            one = growth(looks, warm_at_s=warm_at_s, warm_up_s=warm_up_s, least_s=least_s)
            if one is not None:
                found[name].append(one)
        return found

    def _live(self) -> None:
        while not self._ending.wait(self.period_s):
            at_s = time.monotonic() - self._began
            for name, part in self.parts.items():
                for process in self.victims.find(part):
                    with suppress(psutil.Error):
                        look = Look(at_s, process.memory_full_info().uss, process.num_fds())
                        self.series.setdefault((name, process.pid, process.create_time()), []).append(look)
