"""The proxy follows its owner's table, tells when it has let go, and serves nothing once the lease has run out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from router import Limits, Router, Upstream
from router.proxy import Follower, Refused, Table, TableReport, Target, Targets
from tests.support.upstreams import running, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Owner:
    """Answers a poll at once if its table is new, else when it is told to; `silent` it never answers."""

    table: Table = field(default_factory=lambda: Table(1))
    reports: list[TableReport] = field(default_factory=list)
    silent: bool = False
    asked_again: asyncio.Event = field(default_factory=asyncio.Event)

    async def poll(self, report: TableReport) -> Table:
        self.reports.append(report)
        if self.silent:
            await asyncio.Event().wait()
        if report.known == self.table.version:
            self.asked_again.clear()
            await self.asked_again.wait()
        return self.table

    def tell(self, **targets: Target) -> int:
        self.table = Table(self.table.version + 1, targets)
        self.asked_again.set()
        return self.table.version

    async def report(self) -> TableReport:
        """One that is made from here on."""
        before = len(self.reports)
        while len(self.reports) == before:
            self.asked_again.set()
            await asyncio.sleep(0.001)
        return self.reports[-1]

    async def until_applied(self, version: int) -> None:
        async with asyncio.timeout(20):
            while (await self.report()).applied < version:
                pass


@dataclass
class Following:
    owner: Owner
    router: Router
    targets: Targets
    follower: Any

    def code(self, name: str) -> str | None:
        try:
            self.targets.find(name)
        except Refused as exc:
            return exc.code
        return None


@asynccontextmanager
async def following(*, handover_s: float = 20.0) -> AsyncIterator[Following]:
    owner = Owner()
    async with Router(Limits(server_concurrency=4, eject_after=1, max_faults=1)) as router:
        targets = Targets(router)
        follower = Follower(owner, targets, router, lease_s=20.0, handover_s=handover_s)
        task = asyncio.create_task(follower.run())
        try:
            yield Following(owner, router, targets, follower)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_an_upstream_is_let_go_of_once_nothing_is_in_flight_on_it_and_not_before() -> None:
    async with running("a", held=True) as a, running("b") as b, following() as proxy:
        first = proxy.owner.tell(lane=Target((a.fake.upstream,)))
        await proxy.owner.until_applied(first)
        task = asyncio.create_task(proxy.router.post("lane", "/generate", b"{}", timeout_s=20))
        await until(lambda: a.fake.in_flight == 1)
        second = proxy.owner.tell(lane=Target((b.fake.upstream,)))
        await until(lambda: proxy.router.stats().targets["lane"].upstreams == ("b",))
        third = proxy.owner.tell(lane=Target((b.fake.upstream,)), more=Target())
        await until(lambda: "more" in proxy.router.stats().targets)
        assert [(await proxy.owner.report()).applied for _ in range(3)] == [first] * 3
        a.fake.open.set()
        assert (await task).upstream == "a"
        await proxy.owner.until_applied(third)
        assert second < third


async def test_an_upstream_that_changes_its_target_is_not_let_go_of_while_the_old_one_uses_it() -> None:
    async with running("a", held=True) as a, following() as proxy:
        first = proxy.owner.tell(lane=Target((a.fake.upstream,)), other=Target())
        await proxy.owner.until_applied(first)
        task = asyncio.create_task(proxy.router.post("lane", "/generate", b"{}", timeout_s=20))
        await until(lambda: a.fake.in_flight == 1)
        second = proxy.owner.tell(lane=Target(), other=Target((a.fake.upstream,)))
        await until(lambda: proxy.router.stats().targets["other"].upstreams == ("a",))
        more = asyncio.create_task(proxy.router.post("other", "/generate", b"{}", timeout_s=20))
        await until(lambda: a.fake.in_flight == 2)
        assert (await proxy.owner.report()).applied == first
        proxy.router.remove("other", "a")
        a.fake.open.set()
        await asyncio.gather(task, more)
        await proxy.owner.until_applied(second)


async def test_what_does_not_finish_in_time_runs_again_elsewhere() -> None:
    async with running("a", held=True) as a, running("b") as b, following(handover_s=0.1) as proxy:
        await proxy.owner.until_applied(proxy.owner.tell(lane=Target((a.fake.upstream,))))
        task = asyncio.create_task(proxy.router.post("lane", "/generate", b"{}", timeout_s=20))
        await until(lambda: a.fake.in_flight == 1)
        await proxy.owner.until_applied(proxy.owner.tell(lane=Target((b.fake.upstream,))))
        assert (await task).upstream == "b"


async def test_an_ejected_upstream_is_told_of_and_comes_back_with_a_new_proof() -> None:
    async with running("a") as a, following() as proxy:
        a.fake.status = 503
        await proxy.owner.until_applied(proxy.owner.tell(lane=Target((a.fake.upstream,))))
        with pytest.raises(Exception, match="a status"):
            await proxy.router.post("lane", "/generate", b"{}", timeout_s=20)
        assert (await proxy.owner.report()).ejected == ("a",)
        await proxy.owner.until_applied(proxy.owner.tell(lane=Target((a.fake.upstream,)), other=Target()))
        assert (await proxy.owner.report()).ejected == ("a",)
        a.fake.status = 200
        await proxy.owner.until_applied(proxy.owner.tell(lane=Target((replace(a.fake.upstream, proof=1),))))
        assert (await proxy.owner.report()).ejected == ()
        assert (await proxy.router.post("lane", "/generate", b"{}", timeout_s=20)).status == 200


async def test_an_owner_that_answers_no_more_ends_the_lease_and_what_is_at_work() -> None:
    async with running("a", held=True) as a, following() as proxy:
        assert proxy.code("lane") == "no_table"
        await proxy.owner.until_applied(proxy.owner.tell(lane=Target((a.fake.upstream,))))
        task = asyncio.create_task(proxy.router.post("lane", "/generate", b"{}", timeout_s=20))
        await until(lambda: a.fake.in_flight == 1)
        proxy.follower._lease_s, proxy.owner.silent = 0.3, True
        proxy.owner.asked_again.set()  # the last answer
        with pytest.raises(Exception, match="no target"):
            await task
        await until(lambda: a.fake.left == 1)
        assert proxy.code("lane") == "no_table"
        proxy.follower._lease_s, proxy.owner.silent = 20.0, False
        await until(lambda: proxy.code("lane") is None)
        assert any((report.known, report.applied) == (0, 0) for report in proxy.owner.reports[1:])


async def test_a_table_that_is_too_old_is_not_served_from_even_if_nobody_has_noticed() -> None:
    async with following() as proxy:
        await proxy.owner.until_applied(proxy.owner.tell(lane=Target()))
        assert proxy.code("lane") is None
        proxy.targets.leased_until = 0.0
        assert proxy.code("lane") == "no_table"


async def test_an_owner_that_fails_is_asked_again_and_a_name_that_was_served_is_remembered() -> None:
    async with following() as proxy:
        good, proxy.owner.table = proxy.owner.table, None  # type: ignore[assignment]
        proxy.owner.asked_again.set()
        await until(lambda: len(proxy.owner.reports) >= 2)
        proxy.owner.table = good
        await proxy.owner.until_applied(proxy.owner.tell(lane=Target()))
        await proxy.owner.until_applied(proxy.owner.tell())
        assert (proxy.code("lane"), proxy.code("never")) == ("target_gone", "no_target")
        await proxy.owner.until_applied(proxy.owner.tell(lane=Target()))
        assert proxy.code("lane") is None


async def test_a_key_is_not_in_what_is_logged_of_an_upstream() -> None:
    assert "s3cret" not in repr(Table(1, {"lane": Target((Upstream("a", "http://a", {"K": "s3cret"}),))}))
