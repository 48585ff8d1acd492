"""Processes apart whose owner gives up in the middle of starting or ending them."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from eval_service.apart.process import Apart
from tests.support.until import until

LINGERS = "tests.support.lingering"


def test_one_that_takes_long_to_dispose_is_ended_also_where_its_owner_waits_no_longer(tmp_path: Path) -> None:
    async def body() -> None:
        apart = await Apart.start(LINGERS, tmp_path / "log")
        disposing = asyncio.create_task(apart.dispose(600.0))
        await asyncio.sleep(0)
        disposing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await disposing
        assert not psutil.pid_exists(apart.pid)

    asyncio.run(body())


def test_one_whose_owner_is_cancelled_as_it_starts_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Told(Apart):
        async def _exec(self, module: str, theirs: socket.socket, environment: dict[str, str]) -> None:
            await super()._exec(module, theirs, environment)
            started.append(self.pid)

    async def never(**_: Any) -> None:
        await asyncio.Event().wait()

    async def body() -> None:
        monkeypatch.setattr("eval_service.apart.process.asyncio.open_connection", never)
        starting = asyncio.create_task(Told.start(LINGERS, tmp_path / "log"))
        await until(lambda: started)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not psutil.pid_exists(started[0]), "it is reaped by then, and nothing of it is left to the loop"

    asyncio.run(body())
