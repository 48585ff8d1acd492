"""Which targets the proxy serves, as told by whoever owns the upstreams.

Invariants: what is told is a whole table, numbered, and one of a lower number than was seen is refused, since it is of
an owner that was replaced; the report of `applied` says that nothing is in flight any more on
what the tables up to it took away, so that the owner may do with an upstream as it likes. The table is a lease, which
runs from when the proxy asked: past `lease_s` it serves nothing, so that an owner that is not asked any more knows when
it has let go.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from router.proxy.messages import Refused
from router.router import Router
from router.upstream import Upstream

_log = logging.getLogger(__name__)
_REMEMBERED = 10_000  # names of targets that are gone
_RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class Target:
    """One target; its upstreams are proven by whoever tells of them. `vocab_size`: token ids are checked against it."""

    upstreams: tuple[Upstream, ...] = ()
    vocab_size: int | None = None

    @property
    def ids(self) -> set[str]:
        """Its upstreams'."""
        return {upstream.id for upstream in self.upstreams}


@dataclass(frozen=True, slots=True)
class Table:
    """All targets. `elsewhere`: names that somebody else serves, and why this proxy does not."""

    version: int
    targets: Mapping[str, Target] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TableReport:
    """What the proxy tells as it asks: the versions that it knows and has applied (0: none), whom it ejected.

    `holds` are the upstreams that it may send to or has something in flight on, `demand` the requests of each target
    that are in flight or wait.
    """

    known: int = 0
    applied: int = 0
    ejected: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    demand: Mapping[str, int] = field(default_factory=dict)


class Source(Protocol):
    """Whoever owns the upstreams."""

    async def poll(self, report: TableReport) -> Table:
        """A long poll: at once if the table is another than `report.known`, else after a while."""


class Targets:
    """The table that is in force."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._table: Table | None = None
        self._gone: OrderedDict[str, None] = OrderedDict()
        self.leased_until = float("inf")  # on the loop's clock

    def find(self, name: str) -> Target:
        """One that is served now.

        Raises:
            Refused: there is none; 404, 409, 410 or 503 says of which kind.
        """
        if self._table is None or asyncio.get_running_loop().time() > self.leased_until:
            raise Refused(503, "no_table", "nobody has told this proxy its targets", headers={"Retry-After": "1"})
        if (target := self._table.targets.get(name)) is not None:
            return target
        if (why := self._table.elsewhere.get(name)) is not None:
            raise Refused(409, "served_elsewhere", f"target {name!r} is not this proxy's: {why}")
        if name in self._gone:
            raise Refused(410, "target_gone", f"target {name!r} has ended")
        raise Refused(404, "no_target", f"there is no target {name!r}")

    def replace(self, table: Table) -> set[str]:
        """Put a table in force; the ids of upstreams that it takes away from a target. Requests of targets that are
        gone are ended, those on an upstream that left its target finish.
        """
        before = {} if self._table is None else self._table.targets
        for name in before.keys() - table.targets.keys():
            self._router.drop_target(name, abort=True)
            self._gone[name] = None
        for name, target in table.targets.items():
            self._router.set_target(name, target.upstreams)
            self._gone.pop(name, None)
        while len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
        self._table = table
        return {id_ for name, target in before.items() for id_ in target.ids - table.targets.get(name, Target()).ids}

    def suspend(self) -> None:
        """Serve nothing until told again."""
        if self._table is not None:
            for name in self._table.targets:
                self._router.drop_target(name, abort=True)
            self._table = None


class Follower:
    """Keeps `Targets` as the source tells it. `run` never ends by itself."""

    def __init__(self, source: Source, targets: Targets, router: Router, *, lease_s: float, handover_s: float) -> None:
        self._source = source
        self._targets = targets
        self._router = router
        self._lease_s = lease_s
        self._handover_s = handover_s
        self._known = 0
        self._applied = 0
        self._highest = 0
        self._told = ""
        self._leaving: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Ask for ever; give everything up whenever nobody has answered for `lease_s`."""
        loop = asyncio.get_running_loop()
        self._targets.leased_until = loop.time() + self._lease_s
        while True:
            asked = loop.time()
            try:
                async with asyncio.timeout_at(self._targets.leased_until):
                    table = self._fresh(await self._source.poll(self._report()))
            except Exception as exc:  # noqa: BLE001 - the loop's edge: whatever happened, nobody told us anything
                self._tell(f"no table of targets: {type(exc).__name__}: {exc}")
                if loop.time() >= self._targets.leased_until:
                    self._lapse()
                await asyncio.sleep(_RETRY_S)
            else:
                self._told = ""
                self._targets.leased_until = asked + self._lease_s
                self._apply(table)

    def _fresh(self, table: Table) -> Table:
        if table.version < self._highest:
            raise ValueError(f"table {table.version} is of an owner that was replaced; {self._highest} was seen")
        self._highest = table.version
        return table

    def _tell(self, what: str) -> None:
        """Once, and not five times a second for as long as it lasts."""
        if what != self._told:
            _log.warning("%s", what)
        self._told = what

    def _report(self) -> TableReport:
        stats = self._router.stats()
        ejected = tuple(sorted(id_ for id_, upstream in stats.upstreams.items() if not upstream.healthy))
        demand = {name: target.in_flight + target.waiting for name, target in stats.targets.items()}
        return TableReport(self._known, self._applied, ejected, tuple(sorted(stats.upstreams)), demand)

    def _lapse(self) -> None:
        self._known = self._applied = 0
        self._targets.suspend()
        self._targets.leased_until = asyncio.get_running_loop().time() + self._lease_s

    def _apply(self, table: Table) -> None:
        if table.version == self._known:
            return
        self._known = table.version
        loop = asyncio.get_running_loop()
        before = set(self._leaving)
        for id_ in self._targets.replace(table):
            before.add(self._keep(loop.create_task(self._router.vacated(id_, self._handover_s))))
        self._keep(loop.create_task(self._settle(table.version, before)))

    def _keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return task

    async def _settle(self, version: int, before: set[asyncio.Task[None]]) -> None:
        """Once those before it are, and what was in flight on what left has ended, the version is applied."""
        if before:
            await asyncio.wait(before)
        if self._known >= version:
            self._applied = version
