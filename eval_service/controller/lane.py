"""A running point and the engines now leased to it; engines may join and leave while it runs.

Invariants: the result is written once, by the ledger's table; whatever happens to a lane ends in the ledger as a state
of its point; an engine that is let go of has nothing of this lane's left to do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from eval_service.contract.names import samples_file
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import SampleView
from eval_service.controller.db import LedgerThread
from eval_service.controller.fleet import Fleet
from eval_service.controller.generating import Answered, Generation, Spoiled
from eval_service.controller.pinning import Outcome, Pinner, Verdict
from eval_service.ledger.database import Fenced
from eval_service.ledger.moves import Moves, Result, Runnable
from eval_service.suites.samples import write_samples
from eval_service.suites.scoring import Score, ScorerPool
from eval_service.suites.statistics import aggregate
from eval_service.suites.suite import Suite
from router.router import Router
from router.upstream import Upstream


class LaneFault(Exception):
    """An infrastructure fault: the point goes back to `queued`."""

    def __init__(self, fault: str, detail: str) -> None:
        super().__init__(f"{fault}: {detail}")
        self.fault = fault
        self.detail = detail


class LaneEnd(Exception):
    """The point ends without a result."""

    def __init__(self, state: PointState, reason: Reason, detail: str) -> None:
        super().__init__(f"{state}: {reason}: {detail}")
        self.state = state
        self.reason = reason
        self.detail = detail


class Overtaken(Exception):
    """Somebody else ended the point; there is nothing to write."""


@dataclass(frozen=True, slots=True)
class LaneParts:
    """What a lane works with; the same for all lanes of a controller."""

    fleet: Fleet
    router: Router
    moves: Moves
    ledger: LedgerThread
    scorers: ScorerPool
    sample_timeout_s: float
    server_concurrency: int
    on_change: Callable[[], None]


@dataclass(slots=True, eq=False)
class Lane:
    """One attempt at a point."""

    point: Runnable
    suite: Suite
    pinner: Pinner
    parts: LaneParts
    engines: set[str] = field(default_factory=set)
    proven: set[str] = field(default_factory=set)
    task: asyncio.Task[None] | None = None
    _generation: Generation = field(init=False)
    _pins: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _first: asyncio.Event = field(default_factory=asyncio.Event)
    _condemned: asyncio.Future[Exception] = field(init=False)
    _timings: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._generation = Generation(
            self.suite,
            self.parts.router,
            target=self.point.id,
            weight_version=self.pinner.order.weight_version,
            vocab_size=self.point.vocab_size,
            timeout_s=self.parts.sample_timeout_s,
            stale=self.drop,
        )
        self._condemned = asyncio.get_running_loop().create_future()

    # --- engines

    @property
    def room(self) -> int:
        """Further engines that its work is worth: as many as its unsent samples fill, one where it has none left."""
        if not self.engines:
            return int(self._generation.unanswered > 0)
        return max(0, self._generation.unsent // self.parts.server_concurrency - len(self.engines - self.proven))

    def join(self, engine_id: str) -> None:
        """Lease an engine to this lane: it is pinned, and takes work as soon as it is proven."""
        self.engines.add(engine_id)
        self.parts.fleet.engines[engine_id].point = self.point.id
        self._pins[engine_id] = asyncio.get_running_loop().create_task(self._pin(engine_id))

    def drop(self, engine_id: str) -> None:
        """It is lost, stale or was started anew: what it had in flight runs again elsewhere, and it is nobody's."""
        if engine_id in self.engines:
            self.parts.router.remove(self.point.id, engine_id, abort=True)
            engine = self.parts.fleet.engines.get(engine_id)
            if engine is not None:
                engine.pinned = None
            self._let_go(engine_id)

    def release_idle(self) -> None:
        """Nothing is left to send: engines that have nothing of it in flight go on to the next point."""
        if not self.proven or self._generation.unsent:
            return
        upstreams = self.parts.router.stats().upstreams
        for engine_id in sorted(self.engines):
            busy = engine_id in upstreams and upstreams[engine_id].in_flight > 0
            last = self.proven == {engine_id} and self._generation.unanswered > 0
            if not busy and not last:
                self.parts.router.remove(self.point.id, engine_id)
                self._let_go(engine_id)

    def _let_go(self, engine_id: str) -> None:
        self.engines.discard(engine_id)
        self.proven.discard(engine_id)
        pin = self._pins.pop(engine_id, None)
        if pin is not None and pin is not asyncio.current_task():
            pin.cancel()
        engine = self.parts.fleet.engines.get(engine_id)
        if engine is not None and engine.point == self.point.id:
            engine.point = None
        self.parts.on_change()

    async def _pin(self, engine_id: str) -> None:
        try:
            outcome = await self.pinner.pin(engine_id)
        except Exception as exc:  # noqa: BLE001 - the task's edge: the attempt ends with it
            self._condemn(LaneFault("internal", f"pin: {type(exc).__name__}: {exc}"))
            return
        if outcome.verdict is Verdict.PROVEN:
            self._admit(engine_id)
        else:
            self._let_go(engine_id)
            self._judge(outcome)

    def _admit(self, engine_id: str) -> None:
        """It is proven: it takes work from here on."""
        report = self.parts.fleet.engines[engine_id].report
        headers = {"authorization": f"Bearer {report.api_key}"} if report.api_key else {}
        self.parts.router.add(self.point.id, Upstream(engine_id, report.url or "", headers))
        self._pins.pop(engine_id, None)
        self.proven.add(engine_id)
        self._first.set()

    def _judge(self, outcome: Outcome) -> None:
        if outcome.verdict is Verdict.SNAPSHOT:
            self._condemn(LaneEnd(PointState.SKIPPED, Reason.PIN_VIOLATION, outcome.detail))
        elif outcome.verdict is Verdict.NOT_VISIBLE:
            self._condemn(LaneEnd(PointState.SKIPPED, Reason.CKPT_MISSING, outcome.detail))
        elif outcome.verdict is Verdict.FENCED:
            self._condemn(Fenced(outcome.detail))
        elif not self.engines and not self._first.is_set():
            self._condemn(LaneFault("engine", outcome.detail))

    def _condemn(self, why: Exception) -> None:
        if not self._condemned.done():
            self._condemned.set_result(why)

    # --- the life of an attempt

    def start(self) -> asyncio.Task[None]:
        """Begin; the task raises nothing, it ends with its outcome in the ledger."""
        self.parts.router.set_target(self.point.id, [])
        self.task = asyncio.get_running_loop().create_task(self._live())
        return self.task

    def cancel(self) -> None:
        """The point has ended otherwise, or the controller stops: write nothing more."""
        self._condemn(Overtaken())

    async def _live(self) -> None:
        moves, call, point = self.parts.moves, self.parts.ledger, self.point.id
        work = asyncio.create_task(self._attempt())
        try:
            await self._unless_condemned(work)
        except (Overtaken, Fenced):
            pass
        except LaneEnd as exc:
            await call(moves.end, point, exc.state, exc.reason, exc.detail)
        except LaneFault as exc:
            await call(moves.requeue, point, exc.fault, exc.detail, sorted(self.pinner.evidence))
        except Exception as exc:  # noqa: BLE001 - the task's edge: recorded as a fault of this attempt
            await call(moves.requeue, point, "internal", f"{type(exc).__name__}: {exc}", sorted(self.pinner.evidence))
        finally:
            work.cancel()
            self._close()

    async def _unless_condemned(self, work: asyncio.Task[None]) -> None:
        condemned: asyncio.Future[Any] = self._condemned
        await asyncio.wait([work, condemned], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise self._condemned.result()
        await work

    def _close(self) -> None:
        self.parts.router.drop_target(self.point.id, abort=True)
        for engine_id in sorted(self.engines):
            self._let_go(engine_id)

    async def _attempt(self) -> None:
        began = time.monotonic()
        await self._first.wait()
        self._timings["pin_s"] = time.monotonic() - began
        await self._advance(PointState.RUNNING)
        answers = await self._answers()
        self._close()
        await self._advance(PointState.SCORING)
        await self._record(answers)

    async def _answers(self) -> list[Answered]:
        began = time.monotonic()
        try:
            answers = await self._generation.run()
        except* Spoiled as group:
            _raise_fault(group)
        self._timings["generate_s"] = time.monotonic() - began
        return answers

    async def _advance(self, state: PointState) -> None:
        if not await self.parts.ledger(self.parts.moves.advance, self.point.id, state):
            raise Overtaken

    async def _record(self, answers: Sequence[Answered]) -> None:
        began = time.monotonic()
        samples = await self._scored(answers)
        found = await asyncio.to_thread(aggregate, self.suite, samples)
        path = samples_file(self.point.root, self.point.run, self.point.step, self.point.suite, self.point.id)
        await asyncio.to_thread(_write, path, samples)
        self._timings["score_s"] = time.monotonic() - began
        if found.error_rate > self.suite.max_error_rate:
            errors = [sample.error for sample in samples if sample.error]
            detail = f"{found.error_rate:.1%} of the samples errored, such as: {errors[0]}"
            raise LaneEnd(PointState.FAILED, Reason.ERROR_RATE, detail)
        result = Result(
            metrics=found.metrics,
            score=found.score,
            stderr=found.stderr,
            samples_path=str(path),
            weight_version=self.pinner.order.weight_version,
            pin_proof=self.pinner.proof(),
            engines=tuple(sorted({sample.engine for sample in samples if sample.engine})),
            timings=dict(self._timings),
        )
        await self.parts.ledger(self.parts.moves.finish, self.point.id, result)

    async def _scored(self, answers: Sequence[Answered]) -> list[SampleView]:
        given = [answer for answer in answers if answer.generated is not None]
        scores = await self.parts.scorers.score(
            self.suite.scorer,
            [answer.generated.output for answer in given if answer.generated],
            [answer.prompt.answer for answer in given],
        )
        by_index = {answer.prompt.index: score for answer, score in zip(given, scores, strict=True)}
        version = self.pinner.order.weight_version
        return [_sample_view(answer, by_index.get(answer.prompt.index), version) for answer in answers]


def _write(path: Path, samples: Sequence[SampleView]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_samples(path, samples)


def _raise_fault(group: ExceptionGroup[Spoiled]) -> NoReturn:
    raise LaneFault("generation", str(group.exceptions[0])) from group


def _sample_view(answer: Answered, score: Score | None, weight_version: str) -> SampleView:
    generated = answer.generated
    return SampleView(
        index=answer.prompt.index,
        dataset=answer.prompt.dataset,
        prompt=answer.prompt.text,
        answer=answer.prompt.answer,
        output=generated.output if generated else "",
        score=score.value if score else None,
        error=answer.error or (score.error if score else None),
        finish_reason=generated.finish_reason if generated else None,
        prompt_tokens=generated.prompt_tokens if generated else 0,
        output_tokens=generated.output_tokens if generated else 0,
        engine=answer.engine,
        weight_version=generated.weight_version if generated else weight_version,
        latency_s=answer.latency_s,
    )
