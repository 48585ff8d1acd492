"""A fake engine obeys a file: a knob is on for so many times, each is told, and then it is as it was."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from eval_service.engine.fake import Knobs, Orders


@asynccontextmanager
async def obeying(orders: Orders) -> AsyncIterator[None]:
    task = asyncio.create_task(orders.obey())
    try:
        yield
    finally:
        task.cancel()


async def taken(order: Path) -> None:
    async with asyncio.timeout(20):
        while order.exists():  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.01)


def test_a_knob_bites_so_often_and_is_then_what_it_was(tmp_path: Path) -> None:
    asyncio.run(_one_order(tmp_path))


async def _one_order(tmp_path: Path) -> None:
    knobs = Knobs(latency_s=0.25)
    orders = Orders(tmp_path, knobs)
    order, felt = tmp_path / f"{os.getpid()}-1.json", tmp_path / f"{os.getpid()}.felt"
    orders.felt("latency_s")  # of nobody's order: not told
    order.write_text(json.dumps({"knob": "latency_s", "value": 9.0, "times": 2}))
    async with obeying(orders):
        await taken(order)
        assert knobs.latency_s == 9.0
        orders.felt("latency_s")
        orders.felt("hang")
        assert knobs.latency_s == 9.0
        orders.felt("latency_s")
    assert knobs.latency_s == 0.25
    assert felt.read_text() == "latency_s\nlatency_s\n"


def test_an_order_is_taken_back_and_leaves_those_for_other_knobs(tmp_path: Path) -> None:
    asyncio.run(_taken_back(tmp_path))


async def _taken_back(tmp_path: Path) -> None:
    knobs = Knobs(latency_s=0.25)
    first, second = tmp_path / f"{os.getpid()}-1.json", tmp_path / f"{os.getpid()}-2.json"
    first.write_text(json.dumps({"knob": "latency_s", "value": 9.0, "times": 2}))
    second.write_text(json.dumps({"knob": "hang", "value": True, "times": 1}))
    async with obeying(Orders(tmp_path, knobs)):
        await taken(second)
        first.write_text(json.dumps({"knob": "latency_s", "value": 9.0, "times": 0}))
        await taken(first)
    assert (knobs.latency_s, knobs.hang) == (0.25, True)
