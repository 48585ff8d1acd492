"""A file system that hangs holds up whoever asks for what lies on it, for a while, and nobody else."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from eval_service.contract.errors import NotFound, Unavailable
from eval_service.gateway import points, storage
from eval_service.gateway.storage import MOST_CALLS, Storage
from tests.support.api import Api
from tests.support.until import until


@pytest.fixture
def hung() -> Iterator[threading.Event]:
    """What hangs, hangs until the test is over."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def api(tmp_path: Path) -> Api:
    return Api(tmp_path)


def calling() -> int:
    """Threads that ask a storage; others come and go as they like."""
    return sum(thread.name == "storage" for thread in threading.enumerate())


def test_a_call_that_hangs_is_given_up_and_one_that_answers_is_not_affected(hung: threading.Event) -> None:
    async def ask() -> int:
        calls = Storage(answer_s=0.05)
        with pytest.raises(Unavailable, match="does not answer"):
            await calls(hung.wait)
        return await Storage(answer_s=60.0)(len, "four")

    assert asyncio.run(ask()) == 4


def test_what_a_call_raises_is_raised(hung: threading.Event) -> None:
    def fail() -> None:
        raise NotFound("no such file")

    async def ask() -> None:
        await Storage(answer_s=60.0)(fail)

    with pytest.raises(NotFound):
        asyncio.run(ask())


def test_calls_that_hang_are_few_and_the_next_is_refused_at_once(hung: threading.Event) -> None:
    async def ask() -> list[BaseException | bool]:
        calls = Storage(answer_s=0.05)
        await asyncio.gather(*(calls(hung.wait) for _ in range(MOST_CALLS)), return_exceptions=True)
        began = calling()
        found = await asyncio.gather(*(calls(hung.wait) for _ in range(50)), return_exceptions=True)
        assert calling() <= began
        hung.set()
        await until(lambda: not calls._busy)
        calls._answer_s = 60.0  # what does not hang has its time, also on a busy machine
        return [*found, await calls(hung.is_set)]

    *refused, last = asyncio.run(ask())
    assert {type(one) for one in refused} == {Unavailable}
    assert last is True


def test_dispatches_are_answered_while_every_call_to_the_storage_hangs(
    api: Api, hung: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Path.resolve()` on a hung mount in the request would have filled the pool that all requests share."""
    point = api.ledger.done(1)
    monkeypatch.setattr(storage, "ANSWER_S", 0.2)
    api.services.storage = Storage(answer_s=0.2)
    monkeypatch.setattr(points, "_samples", lambda *_: hung.wait())

    async def ask() -> tuple[set[int], int, int]:
        transport = httpx.ASGITransport(api.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=30.0) as client:
            samples = await asyncio.gather(*(client.get(f"/points/{point}/samples") for _ in range(2 * MOST_CALLS)))
            path = str(api.ledger.root / "r1" / "step_2")
            body = {"run": "r1", "step": 2, "reservation": str(uuid.uuid4()), "snapshot": path, "deferred": True}
            dispatched = await client.post("/dispatch", json=body)
            outside = {**body, "step": 3, "reservation": str(uuid.uuid4()), "snapshot": f"{api.ledger.base}/link/x"}
            return (
                {found.status_code for found in samples},
                dispatched.status_code,
                (await client.post("/dispatch", json=outside)).status_code,
            )

    statuses, dispatched, outside = asyncio.run(ask())
    assert statuses == {503}
    assert dispatched == 202
    assert outside == 503, "whether it lies inside can't be told without the file system"
