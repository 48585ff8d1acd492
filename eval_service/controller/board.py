"""What the proxy is told, and what it has let go of.

Invariants: a table's number is higher than that of any former controller's; an engine that the proxy may still send to,
or has something in flight on, is nobody else's. A proxy that has not asked for `LEASE_S` serves nothing any more (it
counts from when it asked, which was earlier); until a new controller has heard of it, all engines may be its.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

from router.proxy import Table, TableReport, Target
from router.upstream import Upstream

LEASE_S = 5.0
_MARGIN_S = 1.0  # in which a former controller that was replaced may still have answered
_POLL_S = 1.0
_TABLES = 1_000_000_000  # of one controller, at most


class Board:
    """The targets that the proxy drives. One event loop owns it.

    Args:
        epoch: of the controller that acts.
        on_change: called when the proxy let go of something, or has requests for a target that had none.
    """

    def __init__(
        self,
        epoch: int,
        *,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._on_change = on_change
        self._table = Table(epoch * _TABLES)
        self._heard_at = clock() + _MARGIN_S
        self._report: TableReport | None = None
        self._removed: dict[str, int] = {}
        self._changed = asyncio.Event()

    # --- the proxy

    async def poll(self, report: TableReport) -> Table:
        """Take a report in; answer at once if the table is another than it knows, else after a while."""
        before, self._report, self._heard_at = self._report, report, self._clock()
        if before is None or before.holds != report.holds or before.demand != report.demand:
            self._on_change()
        if report.known == self._table.version:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._changed.wait()
        return self._table

    def holds(self, engine: str) -> bool:
        """Whether the proxy may send to an engine, or has something in flight on it."""
        if any(engine in target.ids for target in self._table.targets.values()):
            return True
        if self._clock() - self._heard_at > LEASE_S:
            return False
        report = self._report
        return report is None or engine in report.holds or report.known < self._removed.get(engine, 0)

    def known(self, target: str) -> bool:
        """Whether the proxy has been told of it."""
        return self._report is not None and target in self._report.demand

    def ejected(self, engine: str) -> bool:
        """Whether the proxy met so many faults on it that it must be proven anew."""
        return self._report is not None and engine in self._report.ejected

    def demand(self, target: str) -> int:
        """Requests of a target that are in flight or wait."""
        return self._report.demand.get(target, 0) if self._report is not None else 0

    # --- whoever fills it

    def open(self, target: str, vocab_size: int) -> None:
        """A target without engines: its requests wait."""
        self._become({**self._table.targets, target: Target((), vocab_size)})

    def close(self, target: str) -> None:
        """From here on its requests are refused, and those under way end."""
        for engine in self._of(target).ids:
            self.take(target, engine)
        self._become({name: known for name, known in self._table.targets.items() if name != target})

    def put(self, target: str, upstream: Upstream) -> None:
        """A proven engine takes the target's requests."""
        known = self._of(target)
        others = tuple(other for other in known.upstreams if other.id != upstream.id)
        self._become({**self._table.targets, target: Target((*others, upstream), known.vocab_size)})

    def take(self, target: str, engine: str) -> None:
        """It gets no more of them; see `holds`."""
        known = self._of(target)
        if engine in known.ids:
            left = tuple(other for other in known.upstreams if other.id != engine)
            self._become({**self._table.targets, target: Target(left, known.vocab_size)})
            self._removed[engine] = self._table.version

    def elsewhere(self, why: Mapping[str, str]) -> None:
        """Targets that the controller drives."""
        if why != self._table.elsewhere:
            self._become(self._table.targets, why)

    def _of(self, target: str) -> Target:
        return self._table.targets.get(target, Target())

    def _become(self, targets: Mapping[str, Target], elsewhere: Mapping[str, str] | None = None) -> None:
        told = self._table.elsewhere if elsewhere is None else elsewhere
        self._table = Table(self._table.version + 1, dict(targets), dict(told))
        self._changed.set()
        self._changed = asyncio.Event()
