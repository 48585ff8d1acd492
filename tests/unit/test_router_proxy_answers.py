"""The proxy passes on what it should, as it should, and nothing else; real sockets on both sides."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from router import Limits, Upstream
from router.proxy import ROUTES
from tests.support.proxies import LIMITS, asked, connected, proxied, request, scripted
from tests.support.upstreams import running, until

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def test_a_client_library_gets_answers_over_one_kept_connection() -> None:
    async with running("a") as a, proxied(a.fake.upstream) as proxy, httpx.AsyncClient(base_url=proxy.url) as client:
        for _ in range(3):
            answer = await client.post("/lanes/lane/generate", json={"text": "hi"})
            assert (answer.status_code, answer.json()) == (200, {"by": "a"})
            assert answer.headers["x-router-upstream"] == "a"
        assert len(proxy.server.connections) == 1


async def test_the_upstreams_key_is_put_in_and_the_clients_own_is_not_passed_on() -> None:
    async with running("a") as a, proxied(a.fake.upstream) as proxy:
        await asked(proxy, authorization="Bearer mine", x_api_key="mine", cookie="mine", x_kept="yes", te="gzip")
        seen = a.fake.headers[0]
        assert (seen["Authorization"], seen["x-kept"]) == ("Bearer a", "yes")
        assert "mine" not in str(seen)
        assert seen["Host"] == a.fake.url.removeprefix("http://")


async def test_what_a_client_nominates_in_connection_stays_here() -> None:
    async with running("a") as a, proxied(a.fake.upstream) as proxy:
        await asked(proxy, connection="keep-alive, X-Secret", x_secret="here only")
        assert "x-secret" not in {name.lower() for name in a.fake.headers[0]}


async def test_headers_of_the_upstreams_connection_stay_there() -> None:
    reply = (
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: X-Private, close\r\nX-Private: 1\r\nKeep-Alive: 5\r\n"
        b"Upgrade: h2c\r\nX-Kept: yes\r\n\r\n{}"
    )
    async with scripted(reply) as (upstream, _), proxied(upstream) as proxy:
        got = await asked(proxy)
        assert got.headers == {"x-kept": "yes", "x-router-upstream": "scripted", "content-length": "2"}


@pytest.mark.parametrize(
    "path", ["/server_info", "/get_server_info", "/flush_cache", "/update_weights_from_disk", "/abort_request", "/"]
)
async def test_routes_that_change_or_tell_of_an_engine_reach_none(path: str) -> None:
    async with running("a") as a, proxied(a.fake.upstream) as proxy:
        for spelled in (
            path,
            path + "?x=1",
            "/generate/.." + path,
            "/generate/%2e%2e" + path,
            "//generate",
            path + "/",
        ):
            got = await asked(proxy, path=f"/lanes/lane{spelled}")
            assert (got.status, got.code) == (404, "no_route")
        assert a.fake.seen == 0


async def test_every_route_takes_its_own_method_alone() -> None:
    async with scripted(OK) as (upstream, _), proxied(upstream) as proxy:
        for path, method in ROUTES.items():
            other = "GET" if method == b"POST" else "POST"
            assert (await asked(proxy, path=f"/lanes/lane{path.decode()}", method=method.decode())).status == 200
            got = await asked(proxy, path=f"/lanes/lane{path.decode()}", method=other)
            assert (got.status, got.code, got.headers["allow"]) == (405, "method", method.decode())


async def test_a_query_is_passed_on() -> None:
    async with running("a") as a, proxied(Upstream("a", a.fake.url + "/")) as proxy:
        await asked(proxy, path="/lanes/lane/generate?x=%20y")
        assert a.fake.queries == ["x=%20y"]


async def test_an_answer_to_head_has_no_body_that_the_next_one_could_be_taken_for() -> None:
    async with scripted(OK) as (upstream, _), proxied(upstream) as proxy, connected(proxy) as wire:
        wire.ask(method="HEAD")
        assert (await wire.answer(bodyless=True)).status == 405
        wire.ask()
        assert (await wire.answer()).body == b"{}"


async def test_a_stream_is_passed_on_event_by_event() -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    script = (SSE + chunk(b"data: 1\n\n"), gates[0], chunk(b"data: 2\n\n"), gates[1], chunk(b"data: [DONE]\n\n"))
    async with scripted(*script, b"0\r\n\r\n") as (upstream, _), proxied(upstream) as proxy, connected(proxy) as wire:
        wire.ask("/lanes/lane/v1/chat/completions", b'{"stream": true}')
        head = await wire.head()
        assert head.headers["content-type"] == "text/event-stream"
        assert await wire.chunk() == b"data: 1\n\n"  # while the upstream waits to be let on
        gates[0].set()
        assert await wire.chunk() == b"data: 2\n\n"
        gates[1].set()
        assert [await wire.chunk(), await wire.chunk()] == [b"data: [DONE]\n\n", b""]
        wire.ask("/healthz", method="GET", body=b"")
        assert (await wire.answer()).json == {"targets": 1, "in_flight": 0, "waiting": 0}


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_client_that_leaves_cancels_its_request_upstream(streaming: bool) -> None:
    came, never = asyncio.Event(), asyncio.Event()
    script = (came.set, SSE + chunk(b"data: 1\n\n"), never) if streaming else (came.set, never)
    async with scripted(*script) as (upstream, left), proxied(upstream) as proxy:
        async with connected(proxy) as wire:
            wire.ask()
            if streaming:
                await wire.head()
            async with asyncio.timeout(20):
                await came.wait()
            assert proxy.router.stats().upstreams["scripted"].in_flight == 1
        async with asyncio.timeout(20):
            await left.wait()
        await until(lambda: proxy.router.stats().upstreams["scripted"].in_flight == 0)
        assert proxy.router.stats().upstreams["scripted"].faulted == 0


@pytest.mark.parametrize(
    "half",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5000000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nwhole or half, who knows",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"",
    ],
)
async def test_what_broke_off_before_its_first_byte_went_out_runs_again_elsewhere(half: bytes) -> None:
    async with scripted(half) as (bad, _), running("good") as good, proxied(bad, good.fake.upstream) as proxy:
        answers = [await asked(proxy) for _ in range(2)]
        told = [(got.status, got.json if got.whole else None) for got in answers]
        # A head alone is passed on only where the body is streamed; then the connection ends instead.
        streams = (b"chunked\r\n\r\n" in half and b"Length" not in half) or b"5000000" in half
        assert sorted(told, key=str) == sorted(
            [(200, {"by": "good"}), (200, None if streams else {"by": "good"})], key=str
        )


async def test_a_stream_that_breaks_off_never_looks_whole() -> None:
    big = b"HTTP/1.1 200 OK\r\nContent-Length: 5000000\r\n\r\n" + b"x" * 1000
    for half in (SSE + chunk(b"data: 1\n\n"), big):
        async with scripted(half) as (bad, _), proxied(bad) as proxy, connected(proxy) as wire:
            wire.ask()
            got = await wire.answer()
            assert (got.status, got.whole) == (200, False)
            assert await wire.closed() == b""
            assert proxy.router.stats().upstreams["scripted"].faulted == 1


async def test_1xx_is_no_answer() -> None:
    reply = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nX-Early: 1\r\n\r\n" + OK
    async with scripted(reply) as (upstream, _), proxied(upstream) as proxy:
        got = await asked(proxy)
        assert (got.status, got.body, "x-early" in got.headers) == (200, b"{}", False)


async def test_a_second_answer_to_one_request_is_nobodys() -> None:
    evil = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
    async with scripted(OK + evil[:30], asyncio.Event()) as (upstream, _), proxied(upstream) as proxy:
        for _ in range(3):
            assert (await asked(proxy)).body == b"{}"


async def test_4xx_is_passed_on_and_counts_against_nobody() -> None:
    async with running("a") as a, proxied(a.fake.upstream) as proxy:
        a.fake.status = 400
        for _ in range(5):
            assert (await asked(proxy)).status == 400
        assert proxy.router.stats().faults == {}


async def test_5xx_everywhere_is_502_and_tells_no_key() -> None:
    reply = b"HTTP/1.1 500 Oh\r\nContent-Length: 24\r\n\r\nmy key is s3cret, really"
    async with scripted(reply) as (upstream, _), proxied(upstream, limits=LIMITS) as proxy:
        got = await asked(proxy)
        assert (got.status, got.code) == (502, "upstream_failed")
        assert b"s3cret" not in got.body
        assert b"my key is ***, really" in got.body


async def test_waiting_is_bounded_and_each_bound_has_its_status() -> None:
    patient = Limits(server_concurrency=1, max_waiting=1, wait_timeout_s=60)
    async with running("a", held=True) as a, proxied(a.fake.upstream, limits=patient) as proxy:
        async with connected(proxy) as first, connected(proxy) as second:
            first.ask()
            await until(lambda: a.fake.in_flight == 1)
            second.ask()
            await until(lambda: proxy.router.stats().targets["lane"].waiting == 1)
            full = await asked(proxy)
            assert (full.status, full.code, full.headers["retry-after"]) == (429, "queue_full", "1")
            a.fake.open.set()
            assert [(await wire.answer()).status for wire in (first, second)] == [200, 200]
    hasty = Limits(server_concurrency=1, wait_timeout_s=0.2)
    async with running("a", held=True) as a, proxied(a.fake.upstream, limits=hasty) as proxy:
        async with connected(proxy) as first:
            first.ask()
            await until(lambda: a.fake.in_flight == 1)
            late = await asked(proxy)
            assert (late.status, late.code) == (504, "wait_timeout")
            proxy.tell()
            nobody = await asked(proxy)
            assert (nobody.status, nobody.code) == (503, "no_upstream")
            a.fake.open.set()
            assert (await first.answer()).status == 200


async def test_a_target_that_is_gone_is_refused_at_once_and_says_how_it_went() -> None:
    async with running("a", held=True) as a, proxied(a.fake.upstream) as proxy, connected(proxy) as wire:
        wire.ask()
        await until(lambda: a.fake.in_flight == 1)
        proxy.tell(name="next", elsewhere={"busy": "the controller drives it"})
        assert ((await wire.answer()).status, (await asked(proxy)).code) == (410, "target_gone")
        await until(lambda: a.fake.left == 1)
        for name, status, code in (
            ("lane", 410, "target_gone"),
            ("never", 404, "no_target"),
            ("busy", 409, "served_elsewhere"),
            ("n%65xt/no", 404, "no_route"),
        ):
            got = await asked(proxy, path=f"/lanes/{name}/generate")
            assert (got.status, got.code) == (status, code)
        proxy.targets.suspend()
        assert ((await asked(proxy)).status, (await asked(proxy)).code) == (503, "no_table")


async def test_clients_need_the_proxys_key_where_it_has_one() -> None:
    async with running("a") as a, proxied(a.fake.upstream, api_key="a key of the proxy's") as proxy:
        wrong: tuple[dict[str, str], ...] = ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer "})
        for given in wrong:
            got = await asked(proxy, None, **given)
            assert (got.status, got.code) == (401, "unauthorized")
        assert (await asked(proxy, authorization="Bearer a key of the proxy's")).status == 200
        assert a.fake.seen == 1


async def test_a_token_id_out_of_range_reaches_no_engine() -> None:
    async with running("a") as a, proxied(a.fake.upstream, vocab_size=100) as proxy:
        for body in ({"input_ids": [1, 100]}, {"sampling_params": {"logit_bias": {"100": 1}}}):
            got = await asked(proxy, body=json.dumps(body).encode())
            assert (got.status, got.code) == (400, "bad_tokens")
        assert (await asked(proxy, body=b'{"input_ids": [1, 99]}')).status == 200
        assert a.fake.seen == 1


async def test_pipelined_requests_are_answered_in_their_order() -> None:
    async with running("a") as a, proxied(a.fake.upstream) as proxy, connected(proxy) as wire:
        bad = request("/nowhere")
        wire.send((request() + bad) * 20 + b"garbage\r\n\r\n")
        assert [(await wire.answer()).status for _ in range(41)] == [200, 404] * 20 + [400]
        assert await wire.closed() == b""


async def test_a_chunked_body_is_sent_on_whole() -> None:
    async with running("a") as a, proxied(a.fake.upstream) as proxy:
        head = b"POST /lanes/lane/generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        got = await asked(proxy, head + chunk(b'{"a":') + chunk(b"1}") + b"0\r\nX-Trailer: t\r\n\r\n")
        seen = {name.lower(): value for name, value in a.fake.headers[0].items()}
        assert (got.status, seen["content-length"]) == (200, "7")
        assert {"x-trailer", "transfer-encoding"}.isdisjoint(seen)
