"""Lanes that the proxy drives: a real controller and a real proxy over fake engines, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from eval_service.contract.errors import Conflict
from eval_service.contract.states import PointState
from eval_service.controller import serving
from eval_service.ledger.orders import Orders
from eval_service.ledger.servings import Servings
from router.limits import Limits
from router.proxy import ProxyRunner, ProxySettings, Table, TableReport
from tests.support.controller_stand import Stand, said

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Served:
    """A stand, the proxy in front of it, and a client of that. `deaf`: the proxy can't reach the controller."""

    stand: Stand
    http: aiohttp.ClientSession
    proxy: ProxyRunner = field(init=False)
    deaf: bool = False

    async def poll(self, report: TableReport) -> Table:
        controller = self.stand.link.controller
        if controller is None or self.deaf:
            raise ConnectionError("no controller")
        return await controller.poll_proxy(report)

    @property
    def servings(self) -> Servings:
        return Servings(self.stand.database)

    async def evaluated(self, step: int = 1, run: str = "r") -> str:
        """A point that is done."""
        point = self.stand.dispatch(run, step)
        await self.stand.until_done(point)
        return point

    async def open(self, point: str, for_s: float = 600.0) -> None:
        self.servings.open(point, for_s)
        self.wake()
        await self.stand.until(lambda: self.stand.acting.serving.board.known(point))

    def close(self, point: str) -> None:
        self.servings.close(point)
        self.wake()

    def wake(self) -> None:
        assert self.stand.link.controller is not None
        self.stand.link.controller.wake()

    async def until_served(self, point: str, engines: int = 1) -> None:
        await self.stand.until(lambda: self.servings.get(point).engines == engines)

    async def until_asked(self, point: str, requests: int = 1) -> None:
        """The controller has heard of so many requests, which it does with the proxy's next poll."""
        await self.stand.until(lambda: self.stand.acting.serving.board.demand(point) == requests)

    async def until_waits(self, point: str) -> None:
        """It could begin, but for an engine."""
        await self.stand.until(lambda: point in {one.id for one in self.stand.acting._moves.runnable()})

    def told(self) -> bool:
        """Whether the proxy has a table, and has said so."""
        report = self.stand.acting.serving.board._report
        return report is not None and report.known > 0

    async def ask(self, point: str, body: Any = None, path: str = "/generate") -> tuple[int, Any, dict[str, str]]:
        url = f"http://127.0.0.1:{self.proxy.port}/lanes/{point}{path}"
        body = body if body is not None else {"text": "p", "sampling_params": {"max_new_tokens": 16}}
        async with self.http.post(url, json=body) as answer:
            return answer.status, await answer.json(), dict(answer.headers)

    def text(self, point: str) -> str:
        """What the point's own weights answer."""
        return said(self.stand.exports[self.stand.point(point).snapshot or ""].manifest.tensor_digest, "p")

    async def until_code(self, point: str, code: str) -> int:
        async with asyncio.timeout(60):
            while True:
                status, answer, _ = await self.ask(point)
                if answer.get("error", {}).get("code") == code:
                    return status


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SPARE_S", 0.2)


@pytest.fixture
def served_of(tmp_path: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def made(engines: int = 1, handover_s: float = 5.0, **options: Any) -> AsyncIterator[Served]:
        async with Stand(tmp_path, proxy_port=0, **options).running(engines) as stand:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as http:
                served = Served(stand, http)
                limits = Limits(server_concurrency=4, wait_timeout_s=20.0, connect_timeout_s=5.0)
                served.proxy = ProxyRunner(ProxySettings(handover_s=handover_s, grace_s=0.1, limits=limits), served)
                await served.proxy.start()
                try:
                    stand.put_run("r")
                    await stand.until_ready()
                    await stand.until(served.told)
                    yield served
                finally:
                    await served.proxy.stop()

    return made


async def test_an_ended_point_is_served_by_proven_engines_until_it_is_closed_and_refused_then(served_of: Any) -> None:
    async with served_of() as served:
        point = await served.evaluated()
        assert (await served.ask(point))[0] in (404, 409)
        await served.open(point)
        status, answer, headers = await served.ask(point)
        assert (status, answer["text"]) == (200, served.text(point))
        label = answer["meta_info"]["weight_version"]
        assert headers["X-Router-Weights"] == label
        await served.until_served(point)
        assert served.servings.get(point).weight_version == label
        assert label != served.stand.point(point).weight_version, "a pin of its own"
        status, answer, _ = await served.ask(point, {"input_ids": [1, 10**6]})
        assert (status, answer["error"]["code"]) == (400, "bad_tokens")
        served.close(point)
        assert await served.until_code(point, "target_gone") == 410
        await served.stand.until(lambda: served.stand.engine("e0").free)
        await served.stand.until(lambda: served.servings.find(point) is None)
        await served.evaluated(2)


async def test_a_serving_ends_by_its_time(served_of: Any) -> None:
    async with served_of() as served:
        point = await served.evaluated()
        await served.open(point, 100.0)
        assert (await served.ask(point))[0] == 200
        served.stand.clock.ahead_s += 101.0
        served.wake()
        assert await served.until_code(point, "target_gone") == 410
        await served.stand.until(lambda: served.stand.engine("e0").free)


async def test_a_lane_is_driven_by_the_controller_or_by_the_proxy_and_not_both(served_of: Any) -> None:
    async with served_of() as served:
        served.stand.hold_answers("e0")
        point = served.stand.dispatch("r", 1)
        await served.stand.until_state(point, PointState.RUNNING)
        assert await served.until_code(point, "served_elsewhere") == 409
        with pytest.raises(Conflict, match="running"):
            await served.open(point)


async def test_an_engine_goes_to_others_only_when_the_proxy_has_let_go_of_it(served_of: Any) -> None:
    async with served_of(handover_s=60.0) as served:
        stand, point = served.stand, await served.evaluated()
        await served.open(point)
        await served.until_served(point)
        stand.hold_answers("e0")
        slow = asyncio.create_task(served.ask(point))
        await served.until_asked(point)
        other = stand.dispatch("r", 2)
        await served.until_waits(other)
        stand.acting.serving.lanes[point].part_with("e0")
        await served.until_served(point, 0)
        await stand.looked()
        assert stand.engine("e0").point == point, "the proxy has something in flight on it"
        stand.release()
        status, answer, _ = await slow
        assert (status, answer["text"]) == (200, served.text(point))
        await stand.until_done(other)


async def test_an_engine_killed_with_a_request_in_flight_costs_the_client_nothing(served_of: Any) -> None:
    async with served_of(2) as served:
        point = await served.evaluated()
        await served.open(point)
        await served.until_served(point)
        [name] = served.stand.acting.serving.lanes[point].proven
        await served.stand.turn(name, latency_s=20.0)
        asked = asyncio.create_task(served.ask(point))
        await served.until_asked(point)
        served.stand.kill_server(name)
        status, answer, headers = await asked
        assert (status, answer["text"]) == (200, served.text(point))
        assert headers["X-Router-Weights"] == answer["meta_info"]["weight_version"]


async def test_engines_come_with_the_requests_that_fill_them(served_of: Any) -> None:
    async with served_of(2) as served:
        point = await served.evaluated()
        await served.open(point)
        await served.until_served(point)
        served.stand.hold_answers("e0", "e1")
        many = [asyncio.create_task(served.ask(point)) for _ in range(24)]
        await served.until_served(point, 2)
        served.stand.release()
        assert {(await one)[0] for one in many} == {200}


async def test_a_serving_that_nobody_asks_gives_its_engine_to_a_point_and_gets_one_back_with_the_next_request(
    served_of: Any,
) -> None:
    async with served_of() as served:
        point = await served.evaluated()
        await served.open(point)
        await served.until_served(point)
        await served.evaluated(2)
        assert served.servings.get(point).engines == 0
        status, answer, _ = await served.ask(point)
        assert (status, answer["text"]) == (200, served.text(point))


async def test_a_busy_serving_does_not_starve_a_point_that_has_waited_too_long(served_of: Any) -> None:
    async with served_of(handover_s=0.2, point_timeout_s=600.0) as served:
        stand, point = served.stand, await served.evaluated()
        await served.open(point)
        await served.until_served(point)
        stand.hold_answers("e0")
        busy = [asyncio.create_task(served.ask(point)) for _ in range(4)]
        await served.until_asked(point, 4)
        other = stand.dispatch("r", 2)
        await served.until_waits(other)
        assert served.servings.get(point).engines == 1
        stand.clock.ahead_s += stand.config.service.point_timeout_s / 2
        await served.until_served(point, 0)
        stand.release()
        await stand.until_done(other)
        assert {(await one)[0] for one in busy} == {200}


async def test_a_controller_that_takes_over_leaves_alone_what_the_proxy_still_sends_to(served_of: Any) -> None:
    async with served_of(handover_s=60.0) as served:
        stand, point = served.stand, await served.evaluated()
        await served.open(point)
        await served.until_served(point)
        stand.hold_answers("e0")
        slow = asyncio.create_task(served.ask(point))
        await served.until_asked(point)
        await stand.kill_controller()
        stand.start_controller()
        other = stand.dispatch("r", 2)
        await served.until_waits(other)
        await stand.until_ready("e0")
        await served.until_asked(point)
        await stand.looked()
        assert (stand.engine("e0").point, stand.engine("e0").sent) == (None, {}), "no pin comes between"
        stand.release()
        status, answer, _ = await slow
        assert (status, answer["text"]) == (200, served.text(point))
        await stand.until_done(other)
        assert (await served.ask(point))[1]["text"] == served.text(point), "the ledger has it: it goes on"


async def test_with_no_controller_for_a_lease_the_proxy_refuses_and_the_engine_may_be_anybodys(served_of: Any) -> None:
    async with served_of() as served:
        point = await served.evaluated()
        await served.open(point)
        await served.until_served(point)
        served.deaf = True
        assert await served.until_code(point, "no_table") == 503
        served.close(point)
        await served.stand.until(lambda: served.stand.engine("e0").free)
        await served.evaluated(2)


async def test_a_snapshot_that_no_engine_can_load_says_so_and_a_retry_ends_a_serving(served_of: Any) -> None:
    async with served_of() as served:
        point = await served.evaluated()
        served.stand.put_run("p")
        wrong = served.stand.exports[served.stand.point(point).snapshot or ""].manifest.canary
        poisoned = served.stand.export("p", 1, canary=wrong)
        [view] = await served.stand.until_ended(served.stand.dispatch("p", 1, poisoned))
        await served.open(view.id)
        await served.stand.until(lambda: "canary" in (served.servings.get(view.id).detail or ""))
        Orders(served.stand.database).retry(view.id)
        served.wake()
        await served.stand.until(lambda: served.stand.point(view.id).attempts > view.attempts)
        await served.stand.until_ended(view.id)
        assert served.servings.find(view.id) is None


async def test_what_is_served_is_kept_from_garbage_collection(served_of: Any) -> None:
    async with served_of() as served:
        point = await served.evaluated(1)
        await served.open(point)
        path = Path(served.stand.point(point).snapshot or "")
        served.stand.put_run("r", keep=0)
        other = await served.evaluated(2)
        await served.evaluated(3)  # the newest of equals is the best, which is kept as well
        await served.stand.until(lambda: not Path(served.stand.point(other).snapshot or "").exists())
        assert path.is_dir()
        served.close(point)
        await served.stand.until(lambda: not path.exists())
