"""Who is cancelled just as what it waits for comes is cancelled: nothing goes on after its end.

Each case cancels so many turns of the event loop after that, from the very turn on; a cancellation that was taken must
be seen. `asyncio.wait_for` of Python 3.11 keeps one to itself for a turn or two.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval_service.apart.process import Apart
from eval_service.contract.wire import EngineState
from eval_service.controller.board import Board
from eval_service.controller.fleet import Fleet
from eval_service.controller.judging import Judges
from eval_service.controller.pinning import Pinner
from eval_service.controller.proxied import ProxiedLane, ProxiedParts
from eval_service.engine.pin import PinFailed
from eval_service.engine.protocol import Command, CommandKind, CommandResult, EngineReport, PinError, PinEvidence
from eval_service.engine.runner import EngineRunner, RunnerTimes
from eval_service.engine.server import BootOptions
from eval_service.fleet_config import GroupConfig
from eval_service.gateway.waiting import Watch
from eval_service.suites.kinds import LmEvalConfig
from router.router import Router

TURNS = range(6)
HARNESS = LmEvalConfig(kind="lm_eval", tasks=("t",), metric="t/acc")
GROUP = GroupConfig.model_validate({"model": "/m", "grade": "fake"})
LINGERS = "tests.support.lingering"


def go(body: Callable[[], Awaitable[None]]) -> None:
    """Run a test's body under a deadline."""

    async def bounded() -> None:
        async with asyncio.timeout(100):
            await body()

    asyncio.run(bounded())


async def turn(times: int = 10) -> None:
    """Let the loop turn."""
    for _ in range(times):
        await asyncio.sleep(0)


async def cancelled(work: asyncio.Task[Any], after: int) -> None:
    """Cancel it so many turns from now, and see that it takes it, if it has not ended before."""
    await turn(after)
    given = work.cancel()
    await turn(20)
    assert work.done(), "it went on"
    assert work.cancelled() == given, "it ended as if nobody had cancelled it"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No poll ends by itself."""
    for name in ("POLL_S", "IDLE_POLL_S"):
        monkeypatch.setattr(f"eval_service.controller.fleet.{name}", 1000.0)


# --- the controller's pins


class Bench:
    """A fleet of one engine that reports by hand."""

    def __init__(self) -> None:
        self.fleet = Fleet({"eval": GROUP}, epoch=1, lost_after_s=60.0, clock=lambda: 0.0)
        manifest = SimpleNamespace(digest="d")
        order: Any = SimpleNamespace(timeout_s=60.0, visibility_timeout_s=60.0, manifest=manifest)
        self.pinner = Pinner(self.fleet, order, restart_timeout_s=60.0)
        self._numbers = itertools.count(1)
        self._polls: list[asyncio.Task[Command | None]] = []

    def polls(self, state: EngineState = EngineState.READY, **values: Any) -> None:
        """The engine reports; its poll waits, or ends with a command."""
        number = next(self._numbers)
        report = EngineReport("e", "eval", "n", state, 1, "boot", number=number, **values)
        self._polls.append(asyncio.create_task(self.fleet.poll(report)))

    def answers(self, **result: Any) -> None:
        """It reports what became of its last command."""
        self.polls(results=(CommandResult(self.handed[-1].id, **result),))

    @property
    def handed(self) -> list[Command]:
        """The commands that it was given."""
        done = [poll.result() for poll in self._polls if poll.done()]
        return [command for command in done if command is not None]


@pytest.mark.parametrize("after", TURNS)
def test_a_lane_that_lets_an_engine_go_just_as_it_is_ready_goes_on_with_no_pin(after: int) -> None:
    async def body() -> None:
        bench = Bench()
        bench.polls(EngineState.RESTARTING)
        await turn()
        pinning = asyncio.create_task(bench.pinner.pin("e"))
        await turn()
        bench.polls()
        await cancelled(pinning, after)

    go(body)


@pytest.mark.parametrize("after", TURNS)
@pytest.mark.parametrize("kind", [CommandKind.PIN, CommandKind.RESTART])
def test_an_engine_that_is_let_go_just_as_it_answers_is_not_taken_for_the_lanes(kind: CommandKind, after: int) -> None:
    """It may be another lane's by then: to send it this one's requests would be to ask other weights."""

    async def body() -> None:
        bench = Bench()
        bench.polls()
        pinning = asyncio.create_task(bench.pinner.pin("e"))
        while not (bench.handed and bench.handed[-1].kind is kind):
            await turn()
            if bench.handed and bench.handed[-1].kind is not kind:
                bench.answers(ok=False, error=PinError.CANARY, detail="wrong")  # twice, and it is started anew
        bench.answers(ok=True, evidence=PinEvidence("v", "f", "logprobs", 0.0, 0.0, 0.0, 0.0))
        await cancelled(pinning, after)
        assert pinning.cancelled() == ("e" not in bench.pinner.evidence)

    go(body)


class Silent:
    """A process apart that says that it is up when it is let, and nothing more."""

    def __init__(self) -> None:
        self.up = asyncio.Event()
        self._never = asyncio.Event()

    async def answer(self) -> dict[str, Any]:
        await self.up.wait()
        self.up = self._never
        return {}

    async def ask(self, **_message: Any) -> None: ...


@pytest.mark.parametrize("after", TURNS)
def test_lm_evals_lane_that_is_cancelled_just_as_its_process_is_up_ends(after: int, tmp_path: Path) -> None:
    """Its engines are leased for as long as it goes on."""

    async def written(*_: Any) -> bool:
        return True

    async def body() -> None:
        parts: Any = SimpleNamespace(clock=lambda: 0.0)
        parts.ledger, parts.moves = SimpleNamespace(patiently=written), SimpleNamespace(advance=None)
        tasks: Any = SimpleNamespace(digest_now=lambda: "d", digest="d", path=None, config=HARNESS)
        point: Any = SimpleNamespace(id="p", run="r", vocab_size=8)
        pinner: Any = SimpleNamespace(order=SimpleNamespace(weight_version="v"))
        told = ProxiedParts(Board(1), "http://127.0.0.1:9", None, 8, tmp_path)
        lane = ProxiedLane(point, 1, tasks, pinner, parts, tasks=tasks, proxied=told)
        lane._first.set()
        process: Any = Silent()
        evaluating = asyncio.create_task(lane._evaluated(process, tmp_path, tmp_path))
        await turn()
        process.up.set()
        await cancelled(evaluating, after)

    go(body)


# --- an engine's replica


class Link:
    """A controller that hands out what it is given; its calls wait for that."""

    def __init__(self, *commands: Command) -> None:
        self.commands = list(commands)

    async def poll(self, report: EngineReport) -> Command | None:
        if self.commands and report.state is EngineState.READY:
            return self.commands.pop()
        await asyncio.Event().wait()
        return None


class Replica:
    """A runner whose servers are none."""

    def __init__(self, link: Link) -> None:
        self.boots = asyncio.Queue[None]()
        self.servers: list[Any] = []
        self.failing = asyncio.Event()
        options = BootOptions(log=Path(os.devnull))
        times = RunnerTimes(poll_timeout_s=100.0, backoff_s=0.0)
        self.runner = EngineRunner(
            "e", "eval", GROUP, node="n", options=options, link=link, times=times, boot=self._boot
        )
        self.running = asyncio.create_task(self.runner.run())

    async def _boot(self, *_: Any) -> Any:
        await self.boots.get()
        process = SimpleNamespace(exited=asyncio.Event(), exit_code=-9, server_pid=None, supervisor_pid=None)
        made = SimpleNamespace(
            process=process, stop=self._stop, ours=True, nonce=str(len(self.servers)), url="http://127.0.0.1:9",
            keys=SimpleNamespace(api="k"), model=SimpleNamespace(vocab_size=8, context_length=8), weight_version=None,
            pinner=SimpleNamespace(pin=self._pin),
        )  # fmt: skip
        self.servers.append(made)
        return made

    async def _pin(self, _order: Any) -> None:
        self.failing.set()
        raise PinFailed(PinError.DIED, "the connection broke")

    async def _stop(self) -> None:
        self.servers[-1].process.exited.set()

    async def stopped(self, after: int) -> None:
        """Stop it so many turns from now."""
        await turn(after)
        stopping = asyncio.create_task(self.runner.stop())
        await turn(50)
        assert stopping.done(), "a task of it goes on"
        await self.running


@pytest.mark.parametrize("after", TURNS)
def test_a_replica_that_is_stopped_just_as_its_server_dies_in_a_pin_ends(after: int) -> None:
    async def body() -> None:
        order: Any = SimpleNamespace(snapshot="/s", timeout_s=60.0)
        replica = Replica(Link(Command("c", 1, CommandKind.PIN, order)))
        replica.boots.put_nowait(None)
        await replica.failing.wait()
        await turn()
        replica.servers[0].process.exited.set()
        await replica.stopped(after)

    go(body)


@pytest.mark.parametrize("after", TURNS)
def test_a_replica_that_is_stopped_just_as_its_server_is_back_from_a_restart_ends(after: int) -> None:
    async def body() -> None:
        replica = Replica(Link(Command("c", 1, CommandKind.RESTART)))
        replica.boots.put_nowait(None)
        while not (replica.servers and replica.servers[0].process.exited.is_set()):
            await turn()
        await turn()
        replica.boots.put_nowait(None)
        await replica.stopped(after)

    go(body)


# --- others


@pytest.mark.parametrize("after", TURNS)
def test_who_is_cancelled_just_as_the_ledger_changes_looks_no_more(after: int) -> None:
    """A look that went on would hold up its loop's end."""
    asked, go_on = threading.Event(), threading.Event()

    def changes() -> int:
        asked.set()
        assert go_on.wait(100)
        return 1

    async def body() -> None:
        watch = Watch(changes)
        before = watch.turn
        waiting = asyncio.create_task(watch.beyond(before, 100.0))
        assert await asyncio.to_thread(asked.wait, 100)
        go_on.set()
        while watch.turn == before:  # noqa: ASYNC110 - the very turn
            await asyncio.sleep(0)
        await cancelled(waiting, after)

    go(body)


@pytest.mark.parametrize("after", range(3))
def test_who_is_cancelled_just_as_a_process_apart_ends_is_cancelled(after: int, tmp_path: Path) -> None:
    """A function's lane that is over would evaluate with the next process."""

    async def body() -> None:
        apart = await Apart.start(LINGERS, tmp_path / "log")
        disposing = asyncio.create_task(apart.dispose(100.0))
        await turn()
        os.kill(apart.pid, signal.SIGKILL)
        await apart._process.wait()
        await cancelled(disposing, after)

    go(body)


def test_a_judges_target_is_dropped_also_where_its_lane_is_cancelled_just_as_the_verdicts_are_in() -> None:
    judge: Any = SimpleNamespace(group="judge")
    fleet: Any = SimpleNamespace(engines={})

    async def body() -> None:
        async with Router() as router:
            asking: Coroutine[Any, Any, Any] = Judges(fleet, router, "p").verdicts(judge, [])
            judging = asyncio.create_task(asking)
            await asyncio.sleep(0)
            assert judging.cancel(), "it waits for the end of its own look"
            await asyncio.wait([judging], timeout=60)
            assert judging.cancelled()
            assert router.stats().targets == {}

    go(body)
