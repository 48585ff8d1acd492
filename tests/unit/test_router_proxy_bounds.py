"""What a client may do to the proxy is bounded, and every bound has its answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.proxy import ProxyLimits
from tests.support.proxies import asked, connected, proxied, request, scripted
from tests.support.upstreams import running, until

pytestmark = pytest.mark.anyio
SMALL = ProxyLimits(max_head_bytes=1000, max_body_bytes=1000, hold_bytes=100, linger_s=0.3)
HASTY = replace(SMALL, head_timeout_s=0.3, body_timeout_s=0.3)  # for who sends half: we may be as slow ourselves
START = b"POST /lanes/lane/generate HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (START + b"Content-Length: 1001\r\n\r\n", 413, "body_too_big"),
        (START + b"Transfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001, 413, "body_too_big"),
        (START + b"X: " + b"y" * 1001 + b"\r\n\r\n", 431, "head_too_big"),
        (START + b"X: " + b"y" * 300_000, 431, "head_too_big"),
        (b"POST /" + b"x" * 300_000, 431, "head_too_big"),
        (START + b"X: y\r\n" * 101 + b"\r\n", 431, "head_too_big"),
        (START + b"X: half", 408, "request_timeout"),
        (START + b"Content-Length: 10\r\n\r\nhalf", 408, "request_timeout"),
        (START.replace(b"1.1", b"1.0") + b"\r\n", 505, "http_version"),
        (START + b"Expect: the-unexpected\r\nContent-Length: 0\r\n\r\n", 417, "expectation"),
        (START + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501, "transfer_encoding"),
        (START + b"Host: y\r\nContent-Length: 0\r\n\r\n", 400, "bad_request"),
        (START.replace(b"Host: x\r\n", b"Content-Length: 0\r\n\r\n"), 400, "bad_request"),
        (START + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400, "bad_request"),
        (START + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", 400, "bad_request"),
        (START + b"Content-Length: -2\r\n\r\n", 400, "bad_request"),
        (START + b"X : y\r\n\r\n", 400, "bad_request"),
        (START + b"X: a\x00b\r\n\r\n", 400, "bad_request"),
        (START + b"X: a\r\n folded\r\n\r\n", 400, "bad_request"),
        (START + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", 400, "bad_request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "bad_request"),
        (b"CONNECT host:1 HTTP/1.1\r\nHost: host:1\r\n\r\n", 404, "no_route"),
    ],
)
async def test_what_is_no_request_is_refused_and_the_connection_ended(sent: bytes, status: int, code: str) -> None:
    long = len(sent) > 100_000  # more than is read at once: it is not cut off while it comes, whoever pauses
    limits = HASTY if status == 408 else replace(SMALL, linger_s=20.0) if long else SMALL
    async with running("a") as a, proxied(a.fake.upstream, clients=limits) as proxy:
        async with connected(proxy) as wire:
            wire.send(sent)
            got = await wire.answer()
            assert (got.status, got.code, got.headers["connection"]) == (status, code, "close")
            assert await wire.closed() == b""
            if not long:  # the client stays, and is not waited for
                await until(lambda: not proxy.server.connections)
        await until(lambda: not proxy.server.connections)
        assert (a.fake.seen, proxy.server.buffered_bytes) == (0, 0)


async def test_what_is_held_for_all_clients_together_is_bounded() -> None:
    limits = ProxyLimits(max_buffered_bytes=1500)
    async with running("a", held=True) as a, proxied(a.fake.upstream, clients=limits) as proxy:
        async with connected(proxy) as first:
            first.ask(body=b"x" * 1000)
            await until(lambda: a.fake.in_flight == 1)
            got = await asked(proxy, body=b"x" * 1000)
            assert (got.status, got.code) == (503, "overloaded")
            a.fake.open.set()
            assert (await first.answer()).status == 200
        await until(lambda: proxy.server.buffered_bytes == 0)


async def test_clients_that_leave_at_once_leave_nothing_behind() -> None:
    async with running("a") as a, proxied(a.fake.upstream) as proxy:
        for turns in range(30):
            async with connected(proxy) as wire:
                wire.send(request() * 3)
                for _ in range(turns % 6):
                    await asyncio.sleep(0)
        await until(lambda: not proxy.server.connections)
        await until(lambda: proxy.router.stats().targets["lane"].in_flight == 0)
        assert proxy.server.buffered_bytes == 0
        assert proxy.router.stats().faults == {}


async def test_one_client_too_many_is_told_so() -> None:
    async with running("a") as a, proxied(a.fake.upstream, clients=ProxyLimits(max_connections=1)) as proxy:
        async with connected(proxy) as first:
            first.ask()
            assert (await first.answer()).status == 200
            async with connected(proxy) as second:
                assert ((await second.answer()).status, await second.closed()) == (503, b"")
            first.ask()
            assert (await first.answer()).status == 200


async def test_an_idle_client_is_let_go_of() -> None:
    async with proxied(clients=ProxyLimits(idle_timeout_s=0.1)) as proxy, connected(proxy) as wire:
        assert await wire.closed() == b""


async def test_a_client_that_expects_100_is_told_to_go_on() -> None:
    async with running("a") as a, proxied(a.fake.upstream) as proxy, connected(proxy) as wire:
        wire.send(START + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert (await wire.answer()).status == 100
        wire.send(b"{}")
        assert (await wire.answer()).status == 200


async def test_a_client_that_does_not_read_holds_the_upstream_up_and_is_cut_off() -> None:
    pieces = [b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n", *[b"x" * 1_000_000] * 100]
    clients = ProxyLimits(write_timeout_s=0.5)
    async with scripted(*pieces, asyncio.Event()) as (upstream, left), proxied(upstream, clients=clients) as proxy:
        async with connected(proxy) as wire:
            wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
            wire.ask()
            async with asyncio.timeout(20):
                await left.wait()
        await until(lambda: not proxy.server.connections)
        assert proxy.router.stats().upstreams["scripted"].faulted == 0


async def test_a_slow_client_gets_all_of_it() -> None:
    body = bytes(range(256)) * 40_000
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with scripted(reply, body, asyncio.Event()) as (upstream, _), proxied(upstream) as proxy:
        async with connected(proxy) as wire:
            wire.ask()
            await wire.head()
            taken = b""
            while len(taken) < len(body):
                taken += await wire.reader.read(60_000)
                await asyncio.sleep(0)
            assert taken == body
            wire.ask()
            await wire.head()
            assert await wire.reader.readexactly(len(body)) == body


async def test_stopping_lets_what_is_at_work_finish_and_takes_nothing_more() -> None:
    async with running("a", held=True) as a, proxied(a.fake.upstream) as proxy:
        async with connected(proxy) as busy, connected(proxy) as idle:
            busy.ask()
            await until(lambda: a.fake.in_flight == 1)
            port, stopping = proxy.server.port, asyncio.create_task(proxy.server.stop(20))
            assert await idle.closed() == b""
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", port)
            a.fake.open.set()
            got = await busy.answer()
            assert (got.status, got.headers["connection"], await busy.closed()) == (200, "close", b"")
        await stopping


async def test_a_client_whose_connection_is_taken_as_the_server_stops_is_not_waited_for() -> None:
    async with running("a") as a, proxied(a.fake.upstream) as proxy:
        proxy.server.draining = True  # `stop` has told those that were there
        async with connected(proxy) as late:
            assert await late.closed() == b""


async def test_stopping_ends_at_its_deadline_what_does_not_finish() -> None:
    async with running("a", held=True) as a, proxied(a.fake.upstream) as proxy, connected(proxy) as wire:
        wire.ask()
        await until(lambda: a.fake.in_flight == 1)
        await proxy.server.stop(0.1)
        assert await wire.closed() == b""
        await until(lambda: a.fake.left == 1)


@pytest.mark.parametrize("name", ["max_body_bytes", "idle_timeout_s"])
def test_a_bound_that_bounds_nothing_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        ProxyLimits(**{name: 0})


_TWO = request(body=b'{"text": "hello"}', x_header="some value") + request("/nowhere", b"", "GET")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, len(_TWO) - 1), max_size=12, unique=True))
async def test_however_its_bytes_are_cut_a_request_is_the_same(cuts: list[int]) -> None:
    async with running("a") as a, proxied(a.fake.upstream) as proxy, connected(proxy) as wire:
        for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(_TWO)], strict=True):
            wire.send(_TWO[start:end])
            await asyncio.sleep(0)
        assert [(await wire.answer()).status for _ in range(2)] == [200, 404]


_PIECES = st.sampled_from([START, b"\r\n", b"Content-Length: 5\r\n", b"\x00", b"GET ", b"0\r\n", b"x" * 50])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_PIECES | st.binary(max_size=40), max_size=12))
async def test_whatever_is_sent_the_proxy_ends_it_and_goes_on(pieces: list[bytes]) -> None:
    async with running("a") as a, proxied(a.fake.upstream, clients=SMALL) as proxy:
        async with connected(proxy) as wire:
            wire.send(b"".join(pieces))
            wire.writer.write_eof()
            await wire.closed()
        await until(lambda: not proxy.server.connections)
        assert proxy.server.buffered_bytes == 0
        assert (await asked(proxy)).status == 200
