"""`GET /events` over a real server: in order, resumable on any gateway, bounded, and quiet where nothing happens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from eval_service.contract.errors import Unavailable
from eval_service.gateway import feed as feed_module
from eval_service.gateway.feed import Feed
from eval_service.gateway.waiting import Watch
from eval_service.ledger import events as events_module
from eval_service.ledger.changes import Changes
from eval_service.ledger.events import EventLog
from eval_service.serve.http_server import HttpServer
from tests.support.api import Api
from tests.support.until import until

_WAIT_S = 30.0


@dataclass(frozen=True)
class Told:
    """One event, as a client reads it."""

    id: int | None
    kind: str
    data: dict[str, object]


@dataclass
class Reader:
    """One stream's events, read as a browser reads them."""

    lines: AsyncIterator[str]

    async def next(self) -> Told:
        fields: dict[str, str] = {}
        async for line in self.lines:
            name, _, value = line.partition(": ")
            if line and name in ("id", "event", "data"):
                fields[name] = value
            elif not line and "event" in fields:
                number = fields.get("id")
                return Told(int(number) if number else None, fields["event"], json.loads(fields["data"]))
        raise EOFError

    async def steps(self, count: int) -> list[int]:
        found = [await asyncio.wait_for(self.next(), _WAIT_S) for _ in range(count)]
        return [int(str(one.data["step"])) for one in found]


@pytest.fixture
def api(tmp_path: Path) -> Api:
    found = Api(tmp_path, controller=False)
    found.ledger.put_run(max_in_flight=10**6)
    return found


@pytest.fixture
def url(api: Api) -> Iterator[str]:
    server = HttpServer(lambda: api.app, "127.0.0.1", 0, grace_s=1.0)
    yield f"http://127.0.0.1:{server.port}"
    asyncio.run(server.stop())


@asynccontextmanager
async def following(url: str, after: int | None = None, **params: str | int) -> AsyncIterator[Reader]:
    headers = {} if after is None else {"last-event-id": str(after)}
    async with (
        httpx.AsyncClient(base_url=url, timeout=_WAIT_S) as client,
        client.stream("GET", "/events", params=params, headers=headers) as response,
    ):
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.aiter_lines()
        assert await anext(lines) == "retry: 1000"
        yield Reader(lines)


def test_a_stream_tells_what_happens_from_now_on_in_order(api: Api, url: str) -> None:
    api.ledger.reserve(0)

    async def read() -> list[int]:
        async with following(url) as reader:
            assert len(api.services.feed._streams) == 1, "an answer that has begun misses nothing"
            await asyncio.to_thread(lambda: [api.ledger.reserve(step) for step in range(1, 30)])
            return await reader.steps(29)

    assert asyncio.run(read()) == list(range(1, 30))


def test_a_reader_that_comes_back_misses_nothing_and_sees_nothing_twice(api: Api, url: str) -> None:
    for step in range(700):
        api.ledger.reserve(step)

    async def read() -> list[int]:
        async with following(url, after=100) as reader:
            found = await reader.steps(600)
            await asyncio.to_thread(api.ledger.reserve, 700)
            return found + await reader.steps(1)

    assert asyncio.run(read()) == list(range(100, 701))


def test_another_gateway_goes_on_where_one_left_off_even_if_it_is_behind(api: Api, url: str, tmp_path: Path) -> None:
    """What a client saw at one replica is not told again by another that has not read as far."""

    async def read() -> list[int]:
        feed = Feed(EventLog(api.ledger.db), Watch(Changes(api.ledger.db)))
        async with following(url) as reader:
            await asyncio.to_thread(api.ledger.reserve, 1)
            seen = (await asyncio.wait_for(reader.next(), _WAIT_S)).id
        other = feed.follow(None, None)
        await anext(other)
        waits = asyncio.ensure_future(anext(other))  # this replica reads too, and is set back
        await until(lambda: feed._streams)
        feed._position = 0
        resumed = feed.follow(None, seen)
        await anext(resumed)
        found = asyncio.ensure_future(anext(resumed))
        await asyncio.to_thread(api.ledger.reserve, 2)
        frames = (await asyncio.wait_for(found, _WAIT_S)).decode()
        waits.cancel()
        return [json.loads(line[6:])["step"] for line in frames.splitlines() if line.startswith("data: ")]

    assert asyncio.run(read()) == [2]


def test_a_runs_stream_tells_nothing_of_another_run(api: Api, url: str) -> None:
    api.ledger.put_run("r2", max_in_flight=10)

    async def read() -> list[int]:
        async with following(url, run="r2", after=0) as reader:
            await asyncio.to_thread(api.ledger.reserve, 1)
            await asyncio.to_thread(api.ledger.reserve, 2, "r2")
            return await reader.steps(1)

    assert asyncio.run(read()) == [2]
    assert api.error("GET", "/events", 404, params={"run": "unheard"})["field"] == "run"


def test_who_comes_back_too_late_is_told_that_events_are_gone(
    api: Api, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "KEPT", 2)
    for step in range(5):
        api.ledger.reserve(step)
    api.ledger.retention.forget_events()

    async def read(after: int) -> Told:
        async with following(url, after=after) as reader:
            return await asyncio.wait_for(reader.next(), _WAIT_S)

    for after in (1, 99):  # forgotten, and of another ledger
        told = asyncio.run(read(after))
        assert (told.kind, told.id) == ("reset", 5)
    assert asyncio.run(read(3)).data["step"] == 3


@pytest.mark.parametrize("after", [1, 99])
def test_who_was_told_that_events_are_gone_is_told_what_comes_then(
    api: Api, url: str, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Forgotten, and of another ledger, whose numbers were higher."""
    monkeypatch.setattr(events_module, "KEPT", 2)
    for step in range(5):
        api.ledger.reserve(step)
    api.ledger.retention.forget_events()

    async def read() -> list[int]:
        async with following(url, after=after) as reader:
            assert (await asyncio.wait_for(reader.next(), _WAIT_S)).kind == "reset"
            await asyncio.to_thread(api.ledger.reserve, 7)
            return await reader.steps(1)

    assert asyncio.run(read()) == [7]


def test_a_reader_that_does_not_read_is_dropped_and_costs_the_others_nothing(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "MOST_UNREAD", 10)

    async def read() -> tuple[bytes, int]:
        feed = Feed(EventLog(api.ledger.db), Watch(Changes(api.ledger.db)))
        slow, quick = feed.follow(None, None), feed.follow(None, None)
        for frames in (slow, quick):
            await anext(frames)
        first = [asyncio.ensure_future(anext(frames)) for frames in (slow, quick)]
        await until(lambda: len(feed._streams) == 2)
        seen = 0
        await asyncio.to_thread(api.ledger.reserve, 0)
        await asyncio.wait(first, timeout=_WAIT_S)
        for step in range(1, 31, 5):  # the slow one was given the first event and never comes back for more
            for more in range(5):
                await asyncio.to_thread(api.ledger.reserve, step + more)
            while seen < step + 4:
                seen += (await asyncio.wait_for(anext(quick), _WAIT_S)).count(b"event: point")
        (kept,) = [len(stream.unread) for stream in feed._streams if stream.dropped]
        assert kept == 0
        return await anext(slow), seen

    last, seen = asyncio.run(read())
    assert last.startswith(b"event: dropped")
    assert b"Last-Event-ID" in last
    assert seen == 30


def test_a_stream_beats_while_nothing_happens(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "BEAT_S", 0.01)

    async def read() -> list[bytes]:
        frames = Feed(EventLog(api.ledger.db), Watch(Changes(api.ledger.db))).follow(None, None)
        return [await anext(frames) for _ in range(3)]

    assert asyncio.run(read())[1:] == [b": beat\n\n"] * 2


def test_a_client_that_leaves_leaves_nothing_behind(api: Api, url: str) -> None:
    async def come_and_go() -> None:
        async with following(url):
            assert api.services.feed._streams
        async with asyncio.timeout(_WAIT_S):
            while api.services.feed._streams or api.services.feed._reading is not None:
                await asyncio.to_thread(api.ledger.reserve, 1)
                await asyncio.sleep(0.05)

    asyncio.run(come_and_go())


def test_one_stream_too_many_is_503(api: Api, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MOST_STREAMS", 1)

    async def ask() -> int:
        async with following(url), httpx.AsyncClient(base_url=url, timeout=_WAIT_S) as client:
            return (await client.get("/events")).status_code

    assert asyncio.run(ask()) == Unavailable.status


def test_fifty_streams_share_one_reader(api: Api, url: str) -> None:
    async def read() -> list[list[int]]:
        async with asyncio.timeout(3 * _WAIT_S):
            streams = [following(url) for _ in range(50)]
            readers = [await stream.__aenter__() for stream in streams]
            await asyncio.to_thread(api.ledger.reserve, 1)
            found = [await reader.steps(1) for reader in readers]
            for stream in streams:
                await stream.__aexit__(None, None, None)
            return found

    pages: list[int] = []
    log = api.services.feed._log
    whole = log.after
    log.after = lambda seq: pages.append(seq) or whole(seq)  # type: ignore[func-returns-value,method-assign]
    assert asyncio.run(read()) == [[1]] * 50
    assert len(pages) < 25
