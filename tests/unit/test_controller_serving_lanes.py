"""Lanes that the proxy drives, over engines and a ledger that do as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from eval_service.controller.board import Board
from eval_service.controller.costs import Costs
from eval_service.controller.pinning import Outcome, Verdict
from eval_service.controller.serving import ServedLane, ServedParts, Serving
from eval_service.ledger.servings import Outlook
from router.proxy import TableReport


def go(body: Callable[[], Awaitable[None]]) -> None:
    """Run a test's body."""
    asyncio.run(asyncio.wait_for(body(), 30))


def parts_of(*engines: str) -> ServedParts:
    """Engines that are there and free."""
    free = {id_: SimpleNamespace(id=id_, point=None, pinned=None, lost=False) for id_ in engines}
    fleet: Any = SimpleNamespace(engines=free)
    now = 0.0
    board = Board(1, clock=lambda: now)
    now = 60.0  # no proxy has asked for so long that none serves
    return ServedParts(fleet, board, Costs(8), 8, lambda: None, lambda: now)


@pytest.mark.parametrize(
    ("verdict", "again"), [(Verdict.ENGINE, True), (Verdict.SNAPSHOT, False), (Verdict.NOT_VISIBLE, False)]
)
def test_an_engine_whose_pin_failed_by_its_own_fault_is_had_again_and_the_snapshots_fault_is_remembered(
    verdict: Verdict, again: bool
) -> None:
    async def pin(_engine: str) -> Outcome:
        return Outcome(verdict, detail="it was killed")

    async def body() -> None:
        point: Any = SimpleNamespace(id="p", run="r", vocab_size=8)
        pinner: Any = SimpleNamespace(pin=pin, order=SimpleNamespace(weight_version="v"))
        lane = ServedLane(point, pinner, parts_of("e"))
        lane.join("e")
        await lane.pins["e"]
        assert lane.engines == set()
        assert lane.outlook.detail == "it was killed"
        assert (lane.claim.wants, "e" not in lane.claim.refused) == (1, again)

    go(body)


def test_no_engine_is_told_to_serve_before_the_proxy_has_heard_of_the_lane() -> None:
    """It would answer whoever asks at once that there is no such lane."""

    async def pin(_engine: str) -> Outcome:
        engine.pinned = pinner.order
        return Outcome(Verdict.PROVEN)

    parts = parts_of("e")
    engine: Any = parts.fleet.engines["e"]
    engine.report = SimpleNamespace(api_key=None, url="http://127.0.0.1:9")
    pinner: Any = SimpleNamespace(pin=pin, order=SimpleNamespace(weight_version="v"))

    async def body() -> None:
        point: Any = SimpleNamespace(id="p", run="r", vocab_size=8)
        lane = ServedLane(point, pinner, parts)
        lane.join("e")
        await lane.pins["e"]
        assert lane.outlook == Outlook(0, None, None)
        await parts.board.poll(TableReport(0, 0))
        assert lane.outlook == Outlook(0, None, None)
        await parts.board.poll(TableReport(0, 0, demand={"p": 0}))
        assert lane.outlook == Outlook(1, "v", None)

    go(body)


def test_a_serving_that_cannot_be_begun_says_so_once_and_keeps_no_other_from_being_served() -> None:
    told: dict[str, Outlook] = {}
    asked: list[str] = []

    def manifest(point: str) -> str:
        asked.append(point)
        if point == "bad":
            raise ValueError("no manifest")
        return "manifest"

    async def ledger(call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)

    async def body() -> None:
        live = [SimpleNamespace(id=id_, run="r", vocab_size=8) for id_ in ("bad", "good")]
        moves: Any = SimpleNamespace(epoch=1, look=lambda: (live, []), manifest=manifest, note=told.__setitem__)
        pins: Any = SimpleNamespace(pinner=lambda *_: SimpleNamespace())
        called: Any = ledger
        serving = Serving(parts_of(), moves, called, pins, patience_s=1.0)
        for _ in range(2):
            await serving.tick()
        assert list(serving.lanes) == ["good"]
        assert told["bad"].detail == "it can't be served: ValueError: no manifest"
        assert asked == ["bad", "good"]
        del live[0]  # it was closed
        await serving.tick()
        live.append(SimpleNamespace(id="bad", run="r", vocab_size=8))
        await serving.tick()
        assert asked == ["bad", "good", "bad"], "one that is asked for anew is looked at anew"

    go(body)
