"""A run whose storage hangs waits alone."""

from __future__ import annotations

import asyncio
import threading

import pytest

from eval_service.controller import run_threads
from eval_service.controller.db import NotBegun
from eval_service.controller.run_threads import RunThreads, StorageHangs


def test_a_call_that_hangs_has_a_deadline_and_holds_up_its_own_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_threads, "SLOW_S", 0.01)
    release, over = threading.Event(), threading.Event()

    def hangs() -> None:
        release.wait(30)

    class Told(RunThreads):
        def _count(self, run: str, change: int) -> None:
            super()._count(run, change)
            if run == "hung" and change < 0:
                over.set()

    async def body() -> None:
        threads = Told("t", share=1, at_once=1)
        with pytest.raises(TimeoutError, match="did not answer within"):
            await threads.run("hung", hangs, timeout_s=0.05)
        assert not threads.free("hung")
        with pytest.raises(StorageHangs):
            await threads.run("hung", lambda: True, timeout_s=30)
        assert await threads.run("other", lambda: 7, timeout_s=30) == 7
        release.set()
        assert await asyncio.to_thread(over.wait, 30)
        assert await threads.run("hung", lambda: 8, timeout_s=30) == 8

    try:
        asyncio.run(asyncio.wait_for(body(), 30))
    finally:
        release.set()


def test_calls_that_get_on_take_turns_and_a_slow_one_gives_its_turn_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_threads, "SLOW_S", 0.05)
    begun, release = threading.Event(), threading.Event()

    def hangs() -> bool:
        begun.set()
        return release.wait(30)

    async def body() -> None:
        threads = RunThreads("t", share=1, at_once=1)
        slow = asyncio.create_task(threads.run("a", hangs, timeout_s=30))
        assert await asyncio.to_thread(begun.wait, 30), "it has the only turn"
        assert await threads.run("b", lambda: "b", timeout_s=30) == "b"
        assert not slow.done()
        release.set()
        assert await slow

    try:
        asyncio.run(asyncio.wait_for(body(), 30))
    finally:
        release.set()


def test_a_call_that_was_never_begun_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_threads, "SLOW_S", 600.0)  # the first keeps its turn, however busy the machine is

    async def body() -> None:
        release = threading.Event()
        threads = RunThreads("t", share=1, at_once=1)
        first = asyncio.create_task(threads.run("a", lambda: release.wait(30), timeout_s=30))
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await threads.run("b", lambda: None, timeout_s=0.01)
        assert threads.free("b")
        release.set()
        assert await first

    asyncio.run(asyncio.wait_for(body(), 30))


def test_a_call_for_which_no_thread_could_be_started_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def body() -> None:
        threads = RunThreads("t", share=1, at_once=1)
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", start)
            with pytest.raises(NotBegun, match="can't start new thread"):
                await threads.run("a", lambda: None, timeout_s=30)
        assert threads.free("a")
        assert await threads.run("a", lambda: 7, timeout_s=30) == 7

    asyncio.run(asyncio.wait_for(body(), 30))
