"""Connections to upstreams: kept, shared, and never lost or leaked, whatever happens while one is being made."""

from __future__ import annotations

import asyncio
import select
import socket
from functools import partial
from typing import Any

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


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle connection does not get too old, however long a machine pauses."""
    monkeypatch.setattr("router.transport._KEEPALIVE_S", 600.0)


@pytest.mark.usefixtures("kept")
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


class Connects:
    """A loop that holds up each connection that is being made until it is told what becomes of it, as they were asked
    for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, transport: Transport) -> None:
        self.told: list[asyncio.Future[OSError | None]] = []
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(transport, "_loop", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    async def create_connection(self, *given: Any, **named: Any) -> Any:
        self.told.append(self._loop.create_future())
        if (error := await self.told[-1]) is not None:
            raise error
        return await self._loop.create_connection(*given, **named)

    async def asked(self, count: int) -> None:
        await until(lambda: len(self.told) == count)


async def test_a_connect_that_fails_for_one_that_has_left_is_no_fault_of_another_whose_own_is_coming(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running("a") as a:
        transport = Transport(20.0)
        connects = Connects(monkeypatch, transport)
        left, _ = send(transport, a.fake.upstream)
        other, _ = send(transport, a.fake.upstream)
        await connects.asked(2)
        left.cancel()
        await asyncio.wait([left])
        connects.told[0].set_result(ConnectionRefusedError())
        for _ in range(5):
            await asyncio.sleep(0)
        connects.told[1].set_result(None)
        assert isinstance(await other, Reply)
        await transport.close()


async def test_a_failed_connect_is_told_to_the_one_whose_own_went_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running("a") as a:
        transport = Transport(20.0)
        connects = Connects(monkeypatch, transport)
        a.fake.open.clear()
        first, _ = send(transport, a.fake.upstream)
        second, _ = send(transport, a.fake.upstream)
        await connects.asked(2)
        connects.told[1].set_result(None)
        await until(lambda: a.fake.in_flight == 1)
        connects.told[0].set_result(ConnectionRefusedError())
        reply = await second
        assert isinstance(reply, Broken)
        assert reply.kind is FaultKind.CONNECT
        a.fake.open.set()
        assert isinstance(await first, Reply)
        await transport.close()


@pytest.mark.usefixtures("kept")
async def test_a_connection_that_comes_when_nobody_wants_it_any_more_is_still_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it was being made the pool was empty, and looked through for what is old."""
    async with running("a") as a:
        transport = Transport(20.0)
        connects = Connects(monkeypatch, transport)
        left, _ = send(transport, a.fake.upstream)
        await connects.asked(1)
        left.cancel()
        await asyncio.wait([left])
        transport._drop_old()
        connects.told[0].set_result(None)
        await until(lambda: not transport._making)
        assert isinstance(await send(transport, a.fake.upstream)[0], Reply)
        assert len(connects.told) == 1, "it was used"
        await transport.close()
        await until(lambda: a.runner.server is not None and not a.runner.server.connections)


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
