"""The real gateway over a ledger of made-up runs, behind a real port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Page

from eval_service.access.keyring import Access
from eval_service.contract.states import PinProof, PointState, Reason
from eval_service.contract.wire import DrainRequest, EngineState, FleetView, GroupView, Metric, PlannedPoint
from eval_service.ledger.moves import Result
from eval_service.serve.http_server import HttpServer
from eval_service.suites.samples import write_samples
from tests.support.api import Api
from tests.support.views import engine, sample

STEPS = range(0, 1500, 100)
GAPS = {400: (PointState.SKIPPED, Reason.EXPORT_FAILED), 900: (PointState.FAILED, Reason.DEADLINE)}
ALARMED, BEST, FAULTY = 700, 1400, 1400
HOSTILE = "<img src=x onerror=alert(1)><script>document.title='taken'</script>"
SAMPLES = 240


@dataclass
class Stand:
    """A service at `url`; `points` are those of the run `sft-letters`, by step."""

    base: Path
    access: Access | None = None
    api: Api = field(init=False)
    url: str = ""
    points: dict[int, str] = field(default_factory=dict)
    drain: str = ""

    def __post_init__(self) -> None:
        self.api = Api(self.base, controller=False, access=self.access)
        self.ledger = self.api.ledger
        self.ledger.clock.now = time.time() - 3600.0
        for run in ("sft-letters", "sft-letters-lr3e-5"):
            self.ledger.put_run(run, max_in_flight=1000, num_steps=2000)
        self.ledger.put_run("distilled", max_in_flight=1000)
        for step in STEPS:
            self._step("sft-letters-lr3e-5", step, 0.7)
            self.points[step] = self._step("sft-letters", step, 0.9)
        self.points[1500] = self.ledger.live(PointState.RUNNING, 1500, run="sft-letters")
        self.points[1600] = self.ledger.queued(1600, run="sft-letters")
        self.ledger.intents.progress("sft-letters", 1634)
        self.show_fleet()
        planned = tuple(PlannedPoint(step=step, suite="main") for step in STEPS)
        self.drain = self.ledger.intents.begin_drain(DrainRequest(run="sft-letters", planned=planned, timeout_s=7200.0))

    @contextmanager
    def serving(self) -> Iterator[Stand]:
        """While it listens."""
        server = HttpServer(lambda: self.api.app, "127.0.0.1", 0, grace_s=1.0)
        self.url = f"http://127.0.0.1:{server.port}"
        try:
            yield self
        finally:
            with ThreadPoolExecutor(1) as apart:  # playwright keeps a loop running in the thread of the test
                apart.submit(asyncio.run, server.stop()).result(timeout=60)

    def finish(self, point: str, score: float) -> None:
        """A point that runs gets its result."""
        assert self.ledger.moves.advance(point, PointState.SCORING)
        view = self.ledger.point(point)
        assert self.ledger.moves.finish(point, self._result(view.run, view.step, score))

    def show_fleet(self, in_flight: int = 17) -> None:
        """What a controller writes each second."""
        pinned = {"snapshot": "a" * 32, "weight_version": "aaaaaaaa.1", "point": self.points[1500]}
        engines = (
            engine("eval-0", **pinned, in_flight=in_flight, heard_at=time.time()),
            engine("eval-1", **pinned, in_flight=9, heard_at=time.time(), restarts=1),
            engine(
                "eval-2",
                state=EngineState.QUARANTINED,
                detail="two snapshots could not be loaded",
                heard_at=time.time(),
            ),
        )
        group = GroupView(
            name="eval", kind="owned", grade="cpu", desired=3, actual=3, ready=2, least=0, most=4, engines=engines
        )
        self.ledger.moves.show_life(FleetView(groups=(group,), seen_at=None))

    def _step(self, run: str, step: int, top: float) -> str:
        self.ledger.clock.turn(60.0)
        self.ledger.intents.progress(run, step + step // 20)
        point = self.ledger.queued(step, run=run)
        self.ledger.clock.turn(4.0)
        if run == "sft-letters" and step in GAPS:
            state, reason = GAPS[step]
            assert self.ledger.moves.end(point, state, reason, "the disk was full")
            return point
        if step == FAULTY:
            self.ledger.go(point, PointState.RUNNING)
            self.ledger.moves.requeue(point, "engine_lost", "eval-1 went away", ("eval-1",))
        self.ledger.go(point, PointState.SCORING)
        self.ledger.clock.turn(20.0)
        score = top * (1 - 0.99 ** (step / 6)) + 0.02 * ((step // 100) % 3)
        score -= 0.3 if (run, step) == ("sft-letters", ALARMED) else 0.0
        assert self.ledger.moves.finish(point, self._result(run, step, score))
        return point

    def _result(self, run: str, step: int, score: float) -> Result:
        path = self.base / "samples" / f"{run}-{step}.parquet"
        right = round(score * SAMPLES)
        write_samples(path, [_sample(index, index * 37 % SAMPLES < right) for index in range(SAMPLES)])
        parts = {"exact_match": score, "letters/exact_match": min(1.0, score * 1.1), "truncated": 0.2 - 0.1 * score}
        return Result(
            metrics={name: _metric(value) for name, value in parts.items()},
            score=score,
            stderr=0.02,
            samples_path=str(path),
            weight_version="aaaaaaaa.1",
            pin_proof=PinProof.CANARY,
            engines=("eval-0", "eval-1"),
            timings={
                "export_s": 1.2,
                "queue_s": 4.0,
                "pin_s": 2.1,
                "generate_s": 15.5,
                "score_s": 0.4,
                "duration_s": 22.0,
            },
            headline="exact_match",
            suite_digest="d" * 32,
        )


def _metric(value: float) -> Metric:
    return Metric(value=value, stderr=0.02, n=SAMPLES, low=value - 0.04, high=value + 0.04)


def _sample(index: int, right: bool) -> Any:
    word = f"word{index}"
    changes: dict[str, Any] = {"prompt": f"Write {word} in upper case", "answer": word.upper(), "dataset": "letters"}
    changes |= {"output": word.upper() if right else f"{word.upper()[:-1]}?", "latency_s": 0.2 + index % 7 / 10}
    if index == 11:
        changes |= {"prompt": f"Repeat {HOSTILE}", "output": HOSTILE}
    if index % 40 == 5:
        changes |= {"finish_reason": "length", "output": word * 30, "output_tokens": 64}
    if index % 60 == 7:
        changes |= {"error": "HTTP 400: too long", "finish_reason": None}
        return sample(index).model_copy(update=changes | {"score": None})
    return sample(index, 1.0 if right else 0.0, **changes)


@dataclass
class Watched:
    """A page, and what it did that it should not: errors on its console, requests that leave the host."""

    page: Page
    url: str
    errors: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        host = urlsplit(self.url).netloc
        self.page.on(
            "console", lambda told: self.errors.append(told.text) if told.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.errors.append(error.stack or str(error)))
        self.page.on(
            "request", lambda made: self.strays.append(made.url) if urlsplit(made.url).netloc != host else None
        )

    def go(self, place: str, until: str) -> Page:
        """Open a place, and wait for what it shows."""
        self.page.goto(f"{self.url}/#/{place}")
        self.page.locator(until).first.wait_for()
        return self.page
