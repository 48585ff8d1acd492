"""How quickly the service answers and recovers: `python -m benchmarks.service [--quick] [--json]`.

The service is the real one (`evalfleet serve`, engines of the grade `fake`) over a ledger that holds 10,000 points of
100 runs. A dispatch is what a training step waits for: a reservation. A recovery is over when a controller of a later
epoch has shown itself in the ledger.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.followers import ALL
from benchmarks.harness import Report, arguments, at_most, cpu_s, versions_of
from benchmarks.stocked import SUITE, Stock
from eval_service.chaos.snapshots import write_base
from eval_service.chaos.victims import Part, Victims
from eval_service.contract.client import EvalClient
from eval_service.demo.processes import Child, Family, terminable
from eval_service.demo.service import HOST, free_port, wait_engines, wait_ready
from eval_service.ledger.database import CONTROLLER_AT, Database

_ENGINES = 2
_DRAINS = 50
_STREAMS = 50
_START_S = 180.0
_RECOVERY_S = 60.0
_LOOK_S = 0.02
_STEP = 100_000  # beyond every step that the ledger has


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often each thing is done."""

    dispatches: int = 300  # of one caller
    dispatches_of_16: int = 50  # of each
    statuses: int = 300
    deaths: int = 3
    settle_s: float = 10.0  # for what a start brings with it: the first scan, the first plan of what to delete
    idle_s: float = 60.0  # two scans of the runs
    alone: int = 20  # drains of a run of their own; the rest wait for one run together


QUICK = Rounds(dispatches=60, dispatches_of_16=10, statuses=60, deaths=1, settle_s=5.0, idle_s=6.0, alone=5)


@dataclass(slots=True)
class Served:
    """The service, and how it is reached."""

    base: Path
    stock: Stock
    family: Family = field(default_factory=Family)
    port: int = field(default_factory=free_port)
    step: int = _STEP

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.port}"

    @property
    def ledger(self) -> str:
        """The ledger's URL."""
        return f"sqlite:///{self.base / 'state' / 'ledger.db'}"

    @property
    def victims(self) -> Victims:
        """Its processes."""
        return Victims(self.family)

    def build(self) -> int:
        """Everything that it needs; returns how many points its ledger has."""
        for name in ("runs", "state"):
            (self.base / name).mkdir()
        write_base(self.base / "model")
        (self.base / "main.jsonl").write_text('{"prompt": "a?", "answer": "a"}\n')
        (self.base / "suites.toml").write_text(_SUITES)
        (self.base / "fleet.toml").write_text(_FLEET)
        return self.stock.write(self.ledger, self.base / "runs")

    def start(self) -> None:
        """Start it and wait for its engines."""
        files = ["--fleet", "fleet.toml", "--suites", "suites.toml", "--host", HOST, "--port", str(self.port)]
        child: Child = self.family.start(
            "the service",
            ["eval_service.cli.main", "serve", *files],
            log=self.base / "service.log",
            cwd=self.base,
        )
        with EvalClient(self.url) as client:
            wait_ready(child, client, timeout_s=_START_S)
            wait_engines(child, client, _ENGINES, timeout_s=_START_S, told=lambda _: None)

    def controller(self) -> Any:
        """The controller's process."""
        return self.victims.find(Part.CONTROLLER)[-1]

    def reservation(self, run: str) -> dict[str, Any]:
        """A dispatch's body: a further step."""
        self.step += 1
        return {"run": run, "step": self.step, "reservation": str(uuid.uuid4()), "wait_s": 0.0}


@asynccontextmanager
async def _session(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    timeout, connector = aiohttp.ClientTimeout(total=60.0), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout, raise_for_status=True) as session:
        yield session


async def _ask(session: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> Any:
    async with session.request(method, path, json=body) as response:
        return await response.json()


# --- how fast it answers


async def _times_ms(call: Callable[[], Awaitable[Any]], count: int) -> list[float]:
    found = []
    for _ in range(count):
        began = time.perf_counter()
        await call()
        found.append((time.perf_counter() - began) * 1000)
    return found


async def dispatches(
    served: Served, session: aiohttp.ClientSession, runs: Sequence[str], callers: int, each: int
) -> list[float]:
    """Milliseconds of each reservation, spread over runs; all are taken back afterwards."""

    def reserve() -> Awaitable[Any]:
        return _ask(session, "POST", "/dispatch", served.reservation(runs[served.step % len(runs)]))

    await _times_ms(reserve, 5)
    of_each = await asyncio.gather(*(_times_ms(reserve, each) for _ in range(callers)))
    for run in runs:
        await _ask(session, "POST", f"/runs/{run}/cancel")
    return [found for times in of_each for found in times]


# --- drains


@dataclass(slots=True)
class Waiting:
    """A drain that somebody waits for."""

    run: str
    point: str
    answered_at: float = 0.0

    async def wait(self, session: aiohttp.ClientSession) -> None:
        """One long poll after another, as the client does it."""
        body = {"run": self.run, "drain": str(uuid.uuid4()), "timeout_s": 1200.0}
        while (await _ask(session, "POST", "/drain", body))["open"]:
            pass
        self.answered_at = time.time()


async def _begin_drains(
    served: Served, session: aiohttp.ClientSession, alone: int
) -> tuple[list[Waiting], list[asyncio.Task[None]]]:
    """50 callers that wait: some for a run of their own, the rest all for one more."""
    runs = served.stock.names[: alone + 1]
    points = {}
    for run in runs:
        (point,) = (await _ask(session, "POST", "/dispatch", served.reservation(run)))["points"]
        points[run] = point["id"]
    waiting = [Waiting(runs[min(number, alone)], points[runs[min(number, alone)]]) for number in range(_DRAINS)]
    tasks = [asyncio.create_task(one.wait(session)) for one in waiting]
    await asyncio.sleep(1.0)
    return waiting, tasks


async def _end_drains(
    session: aiohttp.ClientSession, waiting: Sequence[Waiting], tasks: Sequence[asyncio.Task[None]]
) -> list[float]:
    """End each run's last point, one after the other; seconds from its end to the answer of each drain."""
    ended_at = {}
    for point in dict.fromkeys(one.point for one in waiting):
        told = {"reason": "export_failed", "detail": "the benchmark's"}
        await _ask(session, "POST", f"/points/{point}/report", told)
        await asyncio.gather(*(task for task, one in zip(tasks, waiting, strict=True) if one.point == point))
        ended_at[point] = (await _ask(session, "GET", f"/points/{point}"))["ended_at"]
    return [one.answered_at - ended_at[one.point] for one in waiting]


# --- event streams


@asynccontextmanager
async def _followers(url: str, runs: Sequence[str], told: list[int]) -> AsyncIterator[None]:
    """50 of them in a process of their own, every other one of all runs; how many events those were told at the end."""
    whose = [ALL if number % 2 else runs[number % len(runs)] for number in range(_STREAMS)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.followers", url, *whose),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        if not await process.stdout.readline():
            raise RuntimeError("the events can't be followed")
        yield
        found, _ = await process.communicate(b"")
        told += [seen for run, seen in zip(whose, json.loads(found), strict=True) if run == ALL]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


# --- recovery and idleness


def recovery_s(served: Served, *, hang: bool) -> float:
    """Seconds from a signal to the controller to the first sign of life of a later epoch."""
    database = Database(served.ledger)

    def acts() -> int:
        found = database.read_meta(CONTROLLER_AT)
        return int(found[0]) if found else 0

    try:
        before, victim = acts(), served.controller()
        began = time.monotonic()
        landed = served.victims.stop(victim) if hang else served.victims.kill(victim)
        if not landed:
            raise RuntimeError(f"the signal to {victim.pid} did not land")
        while acts() <= before:
            if time.monotonic() > began + _RECOVERY_S:
                return math.inf
            time.sleep(_LOOK_S)
        return time.monotonic() - began
    finally:
        database.close()


def idle_share(served: Served, seconds: float) -> float:
    """The controller's CPU seconds per second while there is nothing to do, in percent."""
    pid = served.controller().pid
    began, before = time.monotonic(), cpu_s(pid)
    time.sleep(seconds)
    return 100 * (cpu_s(pid) - before) / (time.monotonic() - began)


# --- all of it


async def answers(served: Served, report: Report, rounds: Rounds) -> None:
    """Everything that is asked over HTTP."""
    runs = served.stock.names
    async with _session(served.url) as session:
        await _tell_floor(session, report, rounds)
        statuses = await _times_ms(lambda: _ask(session, "GET", "/status"), rounds.statuses)
        _tell_ms(report, "/status", statuses, 50)
        await _dispatch_rounds(served, session, report, rounds, runs, "")
        waiting, tasks = await _begin_drains(served, session, rounds.alone)
        try:
            await _dispatch_rounds(
                served, session, report, rounds, runs[rounds.alone + 1 :], f", {_DRAINS} drains waiting"
            )
            told: list[int] = []
            async with _followers(served.url, runs[rounds.alone + 1 :], told):
                await _dispatch_rounds(
                    served,
                    session,
                    report,
                    rounds,
                    runs[rounds.alone + 1 :],
                    f", {_DRAINS} drains and {_STREAMS} streams",
                )
                await asyncio.sleep(1.0)
            report.counts["events that each stream of all runs was told"] = sorted(set(told))
            late = await _end_drains(session, waiting, tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    report.figures["drain's answer after its last point's end, s"] = _spread(late)
    report.targets["drain's answer after its last point's end, worst, s"] = at_most(max(late), 0.3)


async def _tell_floor(session: aiohttp.ClientSession, report: Report, rounds: Rounds) -> None:
    """What a request that does nothing takes: no dispatch can be faster."""
    for callers, each in ((1, rounds.dispatches), (16, rounds.dispatches_of_16)):
        of_each = await asyncio.gather(
            *(_times_ms(lambda: _ask(session, "GET", "/healthz"), each) for _ in range(callers))
        )
        report.figures[f"a request for nothing, {callers} caller(s), ms"] = _spread([t for ts in of_each for t in ts])


async def _dispatch_rounds(
    served: Served,
    session: aiohttp.ClientSession,
    report: Report,
    rounds: Rounds,
    runs: Sequence[str],
    beside: str,
) -> None:
    one = await dispatches(served, session, runs, 1, rounds.dispatches)
    _tell_ms(report, f"dispatch, 1 caller{beside}", one, 25)
    many = await dispatches(served, session, runs, 16, rounds.dispatches_of_16)
    _tell_ms(report, f"dispatch, 16 callers{beside}", many, 100)


def _tell_ms(report: Report, what: str, times_ms: Sequence[float], most_ms: float) -> None:
    report.figures[f"{what}, ms"] = _spread(times_ms)
    report.targets[f"{what}, p99 ms"] = at_most(_quantile(times_ms, 0.99), most_ms)


def _spread(values: Sequence[float]) -> dict[str, float]:
    marks = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "worst": 1.0}
    return {"n": len(values), **{name: round(_quantile(values, share), 3) for name, share in marks.items()}}


def _quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def measure(*, quick: bool) -> Report:
    """Everything that this benchmark tells."""
    rounds = QUICK if quick else Rounds()
    report = Report("service: how quickly it answers and recovers", versions_of("evalfleet", "fastapi", "ray"))
    with tempfile.TemporaryDirectory(prefix="evalfleet-") as base:
        served = Served(Path(base), Stock())
        report.counts |= {"runs": served.stock.runs, "points": served.build(), "engines": _ENGINES}
        try:
            served.start()
            time.sleep(rounds.settle_s)
            share = idle_share(served, rounds.idle_s)
            asyncio.run(answers(served, report, rounds))
            deaths = {kind: [recovery_s(served, hang=kind == "hang") for _ in range(rounds.deaths)] for kind in _DEATHS}
        finally:
            served.family.end()
    report.counts["load_average"] = [round(load, 1) for load in os.getloadavg()]
    for kind, most_s in _DEATHS.items():
        report.figures[f"recovery after a {kind}, s"] = [round(took_s, 2) for took_s in deaths[kind]]
        report.targets[f"recovery after a {kind}, worst, s"] = at_most(max(deaths[kind]), most_s)
    report.targets["idle controller, % of a core"] = at_most(share, 2.0)
    return report


def main() -> int:
    """Measure and print; 1 where a target was missed."""
    given = arguments(__doc__ or "").parse_args()
    with terminable():
        return measure(quick=given.quick).show(as_json=given.json)


_DEATHS = {"kill": 5.0, "hang": 10.0}
_SUITES = f"""
[suites.{SUITE}]
sampling = {{ max_new_tokens = 8 }}
datasets = [{{ name = "main", path = "main.jsonl" }}]
"""
_FLEET = f"""
[service]
roots = ["runs", "model"]
state_dir = "state"

[groups.eval]
grade = "fake"
model = "model"
num_engines = {_ENGINES}
num_gpus_per_engine = 0
"""

if __name__ == "__main__":
    sys.exit(main())
