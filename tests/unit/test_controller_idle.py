"""A controller that has nothing to do looks at little, and at everything as soon as there may be something."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from eval_service.controller.acting import IDLE_TIME_S, LIFE_S, TIME_S
from tests.support.controller_stand import Stand

LITTLE = ["engines", "housekeeping", "life"]


def test_an_idle_controller_looks_at_everything_only_for_a_reason(tmp_path: Path) -> None:
    """Signs of life of its own are none; a write of anybody else, a lane, a wake, a failure or enough time are."""
    now = 1e9

    async def looks(acting: Any, *, everything: bool = False) -> bool:
        await acting.look_for_changes()
        return [name for name, _ in acting.steps(everything=everything)] != LITTLE

    async def body() -> None:
        nonlocal now
        stand = Stand(tmp_path)
        stand.put_run("r")
        async with asyncio.timeout(60), stand.running(0):
            controller: Any = stand.link.controller
            await stand.until(lambda: controller._acting is not None)
            acting, still = stand.acting, asyncio.Event()

            async def no_tick(_acting: object, *, woken: bool) -> None:
                still.set()

            controller._tick = no_tick  # the looks are the test's own from here
            await still.wait()
            acting._clock = lambda: now
            acting._look_at = acting._shown_at = float("-inf")
            assert [await looks(acting) for _ in range(3)] == [True, False, False]
            await acting._show_life()
            assert not await looks(acting)
            await asyncio.to_thread(stand.intents.progress, "r", 5)
            assert [await looks(acting) for _ in range(2)] == [True, False]
            assert await looks(acting, everything=True)
            now += TIME_S
            assert [await looks(acting) for _ in range(2)] == [True, False]
            await acting._look_at_time()  # nothing is open
            now += IDLE_TIME_S - 1
            assert not await looks(acting)
            now += 1
            assert [await looks(acting) for _ in range(2)] == [True, False]
            await acting._show_life()
            shown, now = now, now + LIFE_S
            await acting._show_life()
            assert acting._shown_at == shown, "a fleet that does nothing shows itself less often"
            acting._lanes["p"] = object()
            assert await looks(acting)
            await acting._show_life()
            assert acting._shown_at == now
            acting._lanes.clear()

    asyncio.run(body())
