"""The router against real servers: choice, replay, faults, cancelling; after each, every slot is given back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from router import (
    Answer,
    DeadlinePassed,
    FaultKind,
    Limits,
    NoTarget,
    NoUpstream,
    QueueFull,
    Router,
    Upstream,
    UpstreamFailed,
    WaitTimeout,
)
from tests.support.upstreams import raw_server, running, until

pytestmark = pytest.mark.anyio

LIMITS = Limits(
    server_concurrency=8, connect_timeout_s=5, request_timeout_s=20, wait_timeout_s=20, same_again_after_s=0.05
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    async with Router(LIMITS) as made:
        yield made
        await until(lambda: _is_idle(made))


def _is_idle(router: Router) -> bool:
    stats = router.stats()
    targets, upstreams = stats.targets.values(), stats.upstreams.values()
    return not any(t.in_flight or t.waiting for t in targets) and not any(u.in_flight for u in upstreams)


def ask(router: Router, timeout_s: float = 20.0) -> asyncio.Task[Answer]:
    return asyncio.create_task(router.post("lane", "/generate", {"text": "hi"}, timeout_s=timeout_s))


async def test_an_answer_is_whole_and_says_who_gave_it(router: Router) -> None:
    async with running("a") as a:
        router.set_target("lane", [a.fake.upstream])
        answer = await ask(router)
        assert (answer.status, json.loads(answer.body), answer.upstream) == (200, {"by": "a"}, "a")
        assert (answer.attempts, answer.latency_s > 0) == (1, True)
        assert a.fake.headers[0]["Authorization"] == "Bearer a"
        assert a.fake.headers[0]["Content-Type"] == "application/json"


async def test_the_least_busy_upstream_is_chosen_and_idle_ones_take_turns(router: Router) -> None:
    async with running("a", held=True) as a, running("b", held=True) as b:
        router.set_target("lane", [a.fake.upstream, b.fake.upstream])
        tasks = [ask(router) for _ in range(10)]
        await until(lambda: a.fake.in_flight == b.fake.in_flight == 5)
        a.fake.open.set()
        b.fake.open.set()
        await asyncio.gather(*tasks)
        for _ in range(4):
            await ask(router)
        assert a.fake.seen == b.fake.seen == 7


async def test_an_upstream_killed_with_requests_in_flight_loses_none(router: Router) -> None:
    async with running("a", held=True) as a, running("b") as b:
        router.set_target("lane", [a.fake.upstream, b.fake.upstream])
        tasks = [ask(router) for _ in range(12)]
        await until(lambda: a.fake.in_flight >= 4)
        await a.kill()
        answers = await asyncio.gather(*tasks)
        assert {answer.upstream for answer in answers} == {"b"}
        assert router.stats().upstreams["a"].healthy is False
        assert router.stats().targets["lane"].capacity == 8


async def test_503_is_run_again_on_another(router: Router) -> None:
    async with running("a") as a, running("b") as b:
        a.fake.status = 503
        router.set_target("lane", [a.fake.upstream, b.fake.upstream])
        answers = [await ask(router) for _ in range(4)]
        assert all(answer.upstream == "b" for answer in answers)
        assert router.stats().faults[FaultKind.STATUS] >= 1


async def test_an_upstream_that_only_answers_503_is_ejected_until_readmitted(router: Router) -> None:
    async with running("a") as a, running("b") as b:
        a.fake.status = 503
        router.set_target("lane", [a.fake.upstream, b.fake.upstream])
        for _ in range(10):
            await ask(router)
        assert (a.fake.seen, router.stats().totals.ejections) == (LIMITS.eject_after, 1)
        a.fake.status = 200
        router.set_target("lane", [a.fake.upstream, b.fake.upstream])
        assert not router.stats().upstreams["a"].healthy
        assert router.readmit("a")
        assert {(await ask(router)).upstream for _ in range(4)} == {"a", "b"}
        assert not router.readmit("never heard of")


async def test_400_is_the_answer_and_five_of_them_leave_the_upstream_healthy(router: Router) -> None:
    async with running("a") as a:
        a.fake.status = 400
        router.set_target("lane", [a.fake.upstream])
        answers = [await ask(router) for _ in range(5)]
        assert [(answer.status, answer.attempts) for answer in answers] == [(400, 1)] * 5
        assert router.stats().upstreams["a"].healthy
        assert router.stats().faults == {}


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", FaultKind.BODY),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", FaultKind.BODY),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nwhole or half, who knows", FaultKind.BODY),
        (b"", FaultKind.DISCONNECTED),
        (b"HTTP/1.1 200 OK\r\nContent-Le", FaultKind.DISCONNECTED),
        (b"220 mail.example ESMTP\r\n\r\n", FaultKind.PROTOCOL),
    ],
)
async def test_a_broken_answer_is_never_passed_on(router: Router, reply: bytes, kind: FaultKind) -> None:
    async with raw_server("bad", reply) as bad, running("good") as good:
        router.set_target("lane", [bad, good.fake.upstream])
        assert (await ask(router)).upstream == "good"
        assert router.stats().faults == {kind: 1}


async def test_a_refused_connection_is_run_again_elsewhere(router: Router) -> None:
    async with running("gone") as gone, running("b") as b:
        router.set_target("lane", [gone.fake.upstream, b.fake.upstream])
        await gone.kill()
        assert (await ask(router)).upstream == "b"
        assert router.stats().faults == {FaultKind.CONNECT: 1}


async def test_faults_are_bounded_and_the_error_tells_them(router: Router) -> None:
    async with running("a") as a, running("b") as b:
        a.fake.status = b.fake.status = 500
        router.set_target("lane", [a.fake.upstream, b.fake.upstream])
        with pytest.raises(UpstreamFailed, match="no answer in 3 runs: a status") as caught:
            await ask(router)
        assert len(caught.value.faults) == LIMITS.max_faults
        assert router.stats().totals.failed == 1


async def test_a_lone_upstream_that_failed_once_gets_the_replay(router: Router) -> None:
    async with running("a") as a:
        a.fake.first = [503]
        router.set_target("lane", [a.fake.upstream])
        assert (await ask(router)).attempts == 2


async def test_a_replay_with_nobody_else_waits_for_one_that_joins(router: Router) -> None:
    async with running("a") as a, running("b") as b:
        router.set_target("lane", [a.fake.upstream])
        await a.kill()
        tasks = [ask(router) for _ in range(6)]
        await until(lambda: router.stats().targets["lane"].waiting == 6 and not router.stats().upstreams["a"].healthy)
        router.add("lane", b.fake.upstream)
        assert {(await task).upstream for task in tasks} == {"b"}


async def test_a_replay_that_nobody_takes_ends_with_its_faults() -> None:
    async with running("a") as a, Router(replace(LIMITS, wait_timeout_s=0.3)) as router:
        router.set_target("lane", [a.fake.upstream])
        await a.kill()
        with pytest.raises(UpstreamFailed, match=r"no other run after .* a connect"):
            await ask(router)


async def test_a_lone_upstream_that_restarts_answers_what_it_had_dropped(router: Router) -> None:
    async with running("a", held=True) as a, running("again") as again:
        router.set_target("lane", [a.fake.upstream])
        task = ask(router)
        await until(lambda: a.fake.in_flight == 1)
        await a.kill()
        await until(lambda: router.stats().totals.ejections == 1)
        router.add("lane", Upstream("a", again.fake.url))
        assert (await task).attempts == LIMITS.eject_after + 1


async def test_a_request_that_ends_every_upstream_it_reaches_is_stopped(router: Router) -> None:
    async with raw_server("a", b"") as a, raw_server("b", b"") as b, raw_server("c", b"") as c, running("d") as d:
        router.set_target("lane", [a, b, c, d.fake.upstream])
        with pytest.raises(UpstreamFailed, match=r"a disconnected .*b disconnected .*c disconnected"):
            await ask(router)
        assert d.fake.seen == 0


async def test_a_client_that_leaves_cancels_its_request_upstream(router: Router) -> None:
    async with running("a", held=True) as a:
        router.set_target("lane", [a.fake.upstream])
        task = ask(router)
        await until(lambda: a.fake.in_flight == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: a.fake.left == 1)
        assert router.stats().totals.left == 1


async def test_the_deadline_ends_a_request_and_blames_nobody(router: Router) -> None:
    async with running("a", held=True) as a:
        router.set_target("lane", [a.fake.upstream])
        with pytest.raises(DeadlinePassed):
            await ask(router, timeout_s=0.1)
        await until(lambda: a.fake.in_flight == 0)
        assert router.stats().faults == {}


async def test_an_upstream_that_hangs_is_at_fault_and_the_request_runs_elsewhere() -> None:
    async with running("a", held=True) as a, running("b") as b, Router(Limits(request_timeout_s=1)) as router:
        router.set_target("lane", [a.fake.upstream, b.fake.upstream])
        task = ask(router)
        await asyncio.sleep(0)  # its first run has begun, with its second
        router.limits = replace(router.limits, request_timeout_s=10)  # for the other, which may be slow and no more
        assert (await task).upstream == "b"
        assert router.stats().faults == {FaultKind.TIMEOUT: 1}


async def test_removal_lets_requests_in_flight_finish_and_sends_no_more(router: Router) -> None:
    async with running("a", held=True) as a, running("b") as b:
        router.set_target("lane", [a.fake.upstream])
        task = ask(router)
        await until(lambda: a.fake.in_flight == 1)
        router.set_target("lane", [b.fake.upstream])
        assert (await ask(router)).upstream == "b"
        a.fake.open.set()
        assert (await task).upstream == "a"
        assert "a" not in router.stats().upstreams


async def test_removal_with_abort_runs_them_again_elsewhere_and_is_no_fault(router: Router) -> None:
    async with running("a", held=True) as a, running("b") as b:
        router.set_target("lane", [a.fake.upstream])
        tasks = [ask(router) for _ in range(LIMITS.server_concurrency)]
        await until(lambda: a.fake.in_flight == len(tasks))
        router.add("lane", b.fake.upstream)
        router.remove("lane", "a", abort=True)
        answers = await asyncio.gather(*tasks)
        assert {(answer.upstream, answer.attempts) for answer in answers} == {("b", 2)}
        await until(lambda: a.fake.left == len(tasks))
        assert router.stats().faults == {}


async def test_a_dropped_target_turns_away_those_who_wait(router: Router) -> None:
    router.set_target("lane", [])
    task = ask(router)
    await until(lambda: router.stats().targets["lane"].waiting == 1)
    router.drop_target("lane")
    with pytest.raises(NoTarget, match="dropped"):
        await task
    with pytest.raises(NoTarget, match="'lane'"):
        await ask(router)


async def test_close_ends_whatever_is_in_flight() -> None:
    async with running("a", held=True) as a:
        router = Router(LIMITS)
        router.set_target("lane", [a.fake.upstream])
        task = ask(router)
        await until(lambda: a.fake.in_flight == 1)
        await router.close()
        with pytest.raises(NoTarget, match="closed"):
            await task


async def test_waits_end_with_the_reason() -> None:
    async with running("a", held=True) as a, Router(Limits(server_concurrency=1, max_waiting=1)) as router:
        router.set_target("lane", [])
        with pytest.raises(NoUpstream):
            await ask(router, timeout_s=0.05)
        router.add("lane", a.fake.upstream)
        first = ask(router)
        await until(lambda: a.fake.in_flight == 1)
        with pytest.raises(WaitTimeout):
            await ask(router, timeout_s=0.05)
        second = ask(router)
        await until(lambda: router.stats().targets["lane"].waiting == 1)
        with pytest.raises(QueueFull):
            await ask(router)
        a.fake.open.set()
        await asyncio.gather(first, second)
        totals = router.stats().totals
        assert (totals.waited_out, totals.refused, totals.answered) == (2, 1, 2)


async def test_a_new_server_under_the_same_id_is_not_blamed_for_the_old_one(router: Router) -> None:
    async with running("old", held=True) as old, running("new") as new:
        router.set_target("lane", [Upstream("e", old.fake.url)])
        tasks = [ask(router) for _ in range(LIMITS.server_concurrency)]
        await until(lambda: old.fake.in_flight == len(tasks))
        router.add("lane", Upstream("e", new.fake.url))
        await old.kill()
        assert {(await task).attempts for task in tasks} == {2}
        assert router.stats().upstreams["e"].healthy
        assert router.stats().totals.ejections == 0
