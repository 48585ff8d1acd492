"""What judges are asked through: the router's target follows the frozen group, whatever comes at which moment."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from eval_service.controller import judging
from eval_service.controller.judging import Judges
from router.router import Router
from tests.support.until import until


def test_a_judge_that_is_lost_just_as_it_is_asked_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "_LOOK_S", 0.001)
    report = SimpleNamespace(group="judge", url="http://127.0.0.1:9", api_key=None)
    engines = {"j": SimpleNamespace(id="j", ready=True, report=report)}
    fleet: Any = SimpleNamespace(engines=engines)
    judge: Any = SimpleNamespace(group="judge", max_new_tokens=1, timeout_s=60.0)

    async def body() -> None:
        async with Router() as router:
            asking = asyncio.create_task(Judges(fleet, router, "p").verdicts(judge, ["right?"]))
            await asyncio.sleep(0)  # it has its target, and nobody looks after that yet
            assert router.stats().targets["judge-p"].upstreams == ("j",)
            engines.clear()
            await until(lambda: not router.stats().targets["judge-p"].upstreams)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert "judge-p" not in router.stats().targets

    asyncio.run(body())
