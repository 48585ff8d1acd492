"""Connections to upstreams: kept, shared, and never lost or leaked, whatever happens while one is being made."""

from __future__ import annotations

import asyncio
import select
import socket
from functools import partial

import pytest

from router import Broken, FaultKind, Router, Upstream
from router.exchange import Exchange, Reply, Request
from router.transport import Transport
from tests.support.proxies import read_request
from tests.support.upstreams import running, until

pytestmark = pytest.mark.anyio
REQUEST = Request(b"POST", b"/generate", b"", b"{}")


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


def send(transport: Transport, upstream: Upstream) -> tuple[asyncio.Task[Reply | Broken], Exchange]:
    exchange = Exchange(upstream.id, asyncio.get_running_loop().create_future())
    return asyncio.create_task(transport.send(upstream, REQUEST, exchange, timeout_s=20.0)), exchange


def _none_left(router: Router) -> bool:
    return router._transport is not None and not router._transport._live()


async def test_connections_are_kept_and_used_again() -> None:
    async with running("a") as a, Router() as router:
        router.set_target("lane", [a.fake.upstream])
        for _ in range(5):
            await router.post("lane", "/generate", b"{}", timeout_s=20)
        assert a.runner.server is not None
        assert len(a.runner.server.connections) == 1


async def test_a_connection_that_the_upstream_closes_while_idle_is_no_fault() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()
        await writer.wait_closed()
        closed.release()

    closed = asyncio.Semaphore(0)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, Router() as router:
        router.set_target("lane", [Upstream("a", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")])
        for _ in range(3):
            assert (await router.post("lane", "/generate", b"{}", timeout_s=20)).attempts == 1
            await closed.acquire()
            await until(partial(_none_left, router))  # the end of it has come here too
        assert router.stats().faults == {}


async def test_one_that_waits_for_a_connection_takes_the_first_that_is_free() -> None:
    """Whoever made it: with the listener full, only the connection that is there already can serve."""
    async with running("a") as a:
        transport = Transport(20.0)
        first, _ = send(transport, a.fake.upstream)
        assert isinstance(await first, Reply)
        a.fake.open.clear()
        tasks = [send(transport, a.fake.upstream)[0] for _ in range(5)]
        await until(lambda: a.fake.in_flight >= 1)
        a.fake.open.set()
        assert all(isinstance(reply, Reply) for reply in await asyncio.gather(*tasks))
        await transport.close()


async def test_nobody_is_left_waiting_for_a_connection_that_could_not_be_made() -> None:
    with socket.socket() as bound:  # bound and not listening: refused
        bound.bind(("127.0.0.1", 0))
        upstream = Upstream("a", f"http://127.0.0.1:{bound.getsockname()[1]}")
        transport = Transport(20.0)
        replies = await asyncio.gather(*(send(transport, upstream)[0] for _ in range(20)))
        assert {reply.kind for reply in replies if isinstance(reply, Broken)} == {FaultKind.CONNECT}
        assert len(replies) == 20
        await transport.close()


@pytest.mark.parametrize("how", ["cancel", "expire", "abort"])
async def test_one_that_gives_up_while_its_connection_is_made_leaves_it_to_others(how: str) -> None:
    async with running("a") as a:
        transport = Transport(20.0)
        task, exchange = send(transport, a.fake.upstream)
        await asyncio.sleep(0)
        if how == "cancel":
            task.cancel()
        else:
            getattr(exchange, how)()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError if how == "cancel" else Broken)
        other, _ = send(transport, a.fake.upstream)
        assert isinstance(await other, Reply)
        assert a.fake.seen == 1
        await transport.close()


async def test_a_connect_that_hangs_ends_at_its_timeout() -> None:
    """A listener whose backlog is full answers no SYN."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        assert select.select([], fillers, [], 20)[1], "the only place is taken"
        transport = Transport(0.2)
        reply = await send(transport, Upstream("a", f"http://127.0.0.1:{address[1]}"))[0]
        assert isinstance(reply, Broken)
        assert (reply.kind, reply.detail) == (FaultKind.CONNECT, "no connection within 0.2 s")
        await transport.close()
        for filler in fillers:
            filler.close()


@pytest.mark.parametrize(
    ("id_", "headers"),
    [
        ("a\r\nX: y", {}),
        ("ä", {}),
        ("a", {"X\r\n": "y"}),
        ("a", {"X": "y\r\nZ: 1"}),
        ("a", {"X": "\x00"}),
        ("a", {"": "y"}),
    ],
)
def test_an_upstream_can_put_no_line_into_a_request_that_is_none(id_: str, headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"^(id|headers): "):
        Upstream(id_, "http://host", headers)
