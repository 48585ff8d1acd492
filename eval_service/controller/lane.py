"""A running point and the engines now leased to it; engines may join and leave while it runs.

Invariants: the result is written once, by the ledger's table; whatever happens to a lane ends in the ledger as a state
of its point, also where the ledger could not be written at first; an engine that is let go of has nothing of this
lane's left to do. A lane without engines waits: its answers are kept, and the point's deadline bounds it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import EngineState
from eval_service.controller.costs import Costs
from eval_service.controller.db import LedgerThread
from eval_service.controller.fleet import Fleet
from eval_service.controller.generating import Answered, Generation, Spoiled, raise_fault
from eval_service.controller.judging import Judges
from eval_service.controller.outcomes import LaneEnd, LaneFault, Overtaken
from eval_service.controller.pinning import Outcome, Pinner, Verdict
from eval_service.controller.recording import Recorder, Weights
from eval_service.controller.scheduler import Claim
from eval_service.ledger.database import Fenced
from eval_service.ledger.moves import Moves, Runnable
from eval_service.objects.places import Places
from eval_service.suites.chat import NoTemplate
from eval_service.suites.rendering import rendered_prompts
from eval_service.suites.scoring import ScorerPool
from eval_service.suites.suite import AnySuite, Suite
from router.router import Router
from router.upstream import Upstream

log = logging.getLogger(__name__)
# What an engine that can't load a snapshot tells of it, the most certain first.
_CERTAINTY = (Verdict.SNAPSHOT, Verdict.SUSPECT, Verdict.NOT_VISIBLE)


class SeenUpstream(Protocol):
    """What a lane looks at of an engine."""

    @property
    def in_flight(self) -> int: ...

    @property
    def healthy(self) -> bool: ...


class SeenStats(Protocol):
    """All engines that a route knows."""

    @property
    def upstreams(self) -> Mapping[str, SeenUpstream]: ...


class Route(Protocol):
    """How a lane's requests reach its engines: the controller's own router, or the proxy's board."""

    def set_target(self, name: str, upstreams: Collection[Upstream], /) -> None: ...
    def add(self, name: str, upstream: Upstream, /) -> None: ...
    def remove(self, name: str, upstream: str, /, *, abort: bool = False) -> None: ...
    def drop_target(self, name: str, /, *, abort: bool = False) -> None: ...
    def stats(self) -> SeenStats: ...


class Work(Protocol):
    """How much a lane has left to do."""

    @property
    def unanswered(self) -> int: ...

    @property
    def unsent(self) -> int: ...

    @property
    def all_made(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class LaneParts:
    """What a lane works with; the same for all lanes of a controller."""

    fleet: Fleet
    router: Router
    moves: Moves
    ledger: LedgerThread
    scorers: ScorerPool
    costs: Costs
    places: Places
    patience_s: float  # of a sample that waits for an engine: as long as a point may take
    handover_s: float
    on_change: Callable[[], None]
    clock: Callable[[], float] = time.monotonic


@dataclass(slots=True, eq=False)
class Lane:
    """One attempt at a point."""

    point: Runnable
    number: int
    suite: AnySuite
    pinner: Pinner
    parts: LaneParts
    engines: set[str] = field(default_factory=set)
    proven: set[str] = field(default_factory=set)
    task: asyncio.Task[None] | None = None
    idle_since: float = field(init=False)
    _suspicions: dict[str, Outcome] = field(default_factory=dict)
    _leaving: dict[str, float] = field(default_factory=dict)
    _route: Route = field(init=False)
    _todo: Work = field(init=False)
    _generation: Generation = field(init=False)
    _pins: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _first: asyncio.Event = field(default_factory=asyncio.Event)
    _condemned: asyncio.Future[Exception] = field(init=False)
    _timings: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._todo = self._work()
        self._condemned = asyncio.get_running_loop().create_future()
        self.idle_since = self.parts.clock()

    def _work(self) -> Work:
        """What is to be done, and the route by which it gets to engines."""
        self._route = self.parts.router
        self._generation = Generation(
            self._prompts,
            self.parts.router,
            target=self.point.id,
            weight_version=self.pinner.order.weight_version,
            vocab_size=self.point.vocab_size,
            patience_s=self.parts.patience_s,
            useless=self._useless,
            answered=self._answered,
            made=self.parts.fleet.throughput.note,
        )
        return self._generation

    @property
    def _prompts(self) -> Suite:
        if not isinstance(self.suite, Suite):
            raise TypeError(f"suite {self.suite.name!r} has no prompts")
        return self.suite

    # --- what the scheduler asks

    @property
    def open(self) -> bool:
        """It has use for engines: it was not ended, and not all of its samples are in."""
        return not self._condemned.done() and self._todo.unanswered > 0

    @property
    def claim(self) -> Claim:
        """What it has use for. An engine in trouble may be long in coming, so it counts as none."""
        there = self.engines - self.pinner.troubled
        waited_s = 0.0 if self.engines else self.parts.clock() - self.idle_since
        return Claim(self.point, self._wants(len(there)), len(self.engines), frozenset(self._suspicions), waited_s)

    def _wants(self, there: int) -> int:
        if not self.open:
            return 0
        if not there:
            return 1
        return max(0, self.parts.costs.engines_for(self.suite.name, self._todo.unsent) - there)

    # --- engines

    def join(self, engine_id: str) -> None:
        """Lease an engine to this lane: it is pinned, and takes work as soon as it is proven."""
        self.engines.add(engine_id)
        self.parts.fleet.engines[engine_id].point = self.point.id
        self._pins[engine_id] = asyncio.get_running_loop().create_task(self._pin(engine_id))

    def drop(self, engine_id: str) -> None:
        """It is lost, ejected or was started anew: what it had in flight runs again elsewhere, and it is nobody's."""
        if engine_id in self.engines:
            self._route.remove(self.point.id, engine_id, abort=True)
            engine = self.parts.fleet.engines.get(engine_id)
            if engine is not None:
                engine.pinned = None
            self._let_go(engine_id)

    def look(self) -> None:
        """Part with engines that are gone, were started anew, were ejected, are leaving, or have nothing left to do."""
        upstreams = self._route.stats().upstreams
        for engine_id in sorted(self.engines):
            engine = self.parts.fleet.engines.get(engine_id)
            if engine is None or engine.lost:
                self.drop(engine_id)
            elif engine.report.state is EngineState.LEAVING:
                self._part_with(engine_id)
            elif engine_id in self.proven:
                ejected = engine_id in upstreams and not upstreams[engine_id].healthy
                if ejected or engine.pinned is not self.pinner.order:
                    self.drop(engine_id)
        self.release_idle()
        self._judge()

    def _part_with(self, engine_id: str) -> None:
        """It says that it leaves: it gets nothing more, and what it has not done in time is taken back."""
        if engine_id not in self.proven:
            self.drop(engine_id)
            return
        self._route.remove(self.point.id, engine_id)
        until = self._leaving.setdefault(engine_id, self.parts.clock() + self.parts.handover_s)
        if not self._in_flight(engine_id):
            self._let_go(engine_id)
        elif self.parts.clock() >= until:
            self._route.add(self.point.id, self._upstream(engine_id))  # only what is a target's can be aborted
            self.drop(engine_id)

    def release_idle(self) -> None:
        """Nothing is left to send: engines that have nothing of it in flight go on to the next point."""
        if not self.proven or self._todo.unsent:
            return
        for engine_id in sorted(self.engines):
            last = self.proven == {engine_id} and self._todo.unanswered > 0
            if not last and not self._in_flight(engine_id):
                self._route.remove(self.point.id, engine_id)
                self._let_go(engine_id)

    def _in_flight(self, engine_id: str) -> int:
        upstream = self._route.stats().upstreams.get(engine_id)
        return upstream.in_flight if upstream else 0

    def _answered(self, latency_s: float | None) -> None:
        """A sample is in. At once, and not with the next tick: an idle engine is another point's."""
        if latency_s is not None:
            self.parts.costs.note_sample(self.suite.name, latency_s)
        if self._todo.all_made:
            self.release_idle()

    def _useless(self, engine_id: str, why: str) -> None:
        """An answer was no use: the engine is out until it is proven anew."""
        if engine_id in self.proven:
            self.drop(engine_id)
            self.parts.fleet.useless(engine_id, why)

    def _let_go(self, engine_id: str) -> None:
        self.engines.discard(engine_id)
        self.proven.discard(engine_id)
        self._leaving.pop(engine_id, None)
        if not self.engines:
            self.idle_since = self.parts.clock()
        pin = self._pins.pop(engine_id, None)
        if pin is not None and pin is not asyncio.current_task():
            pin.cancel()
        engine = self.parts.fleet.engines.get(engine_id)
        if engine is not None and engine.point == self.point.id:
            engine.point = None
        self.parts.on_change()

    # --- pins

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
            self._note_failure(engine_id, outcome)
        self._judge()

    def _admit(self, engine_id: str) -> None:
        """It is proven: it takes work from here on, unless it was started anew in this very moment."""
        self._pins.pop(engine_id, None)
        engine = self.parts.fleet.engines.get(engine_id)
        if engine is None or engine.pinned is not self.pinner.order:
            self._let_go(engine_id)
            return
        if self.pinner.seconds is not None:
            self.parts.costs.note_pin(self.pinner.seconds)
        self._route.add(self.point.id, self._upstream(engine_id))
        self.proven.add(engine_id)
        self._first.set()

    def _upstream(self, engine_id: str) -> Upstream:
        report = self.parts.fleet.engines[engine_id].report
        headers = {"authorization": f"Bearer {report.api_key}"} if report.api_key else {}
        return Upstream(engine_id, report.url or "", headers)

    def _note_failure(self, engine_id: str, outcome: Outcome) -> None:
        if outcome.verdict is Verdict.FENCED:
            self._condemn(Fenced(outcome.detail))
        elif outcome.verdict is Verdict.DISPUTED:
            self._dispute(engine_id, outcome.detail)
        elif outcome.verdict is not Verdict.ENGINE:
            self._suspicions[engine_id] = outcome

    def _dispute(self, engine_id: str, detail: str) -> None:
        """What the lane's engines hold is contested: no sample counts, and whoever may be wrong starts anew."""
        for party in sorted(self.pinner.parties()):
            self.parts.fleet.quarantine(party, f"which of them holds the snapshot is not known: {detail}")
        self._condemn(LaneFault("disagreement", detail))

    def _judge(self) -> None:
        """Who is at fault for the pins that failed: the engines, if any engine proved the snapshot; else it is.

        Undecided while other pins are under way, and while an engine that was not asked yet could tell.
        """
        if not self._suspicions:
            return
        if self.pinner.evidence:
            for engine_id, outcome in list(self._suspicions.items()):
                if outcome.verdict is not Verdict.NOT_VISIBLE:
                    self.parts.fleet.quarantine(engine_id, f"it can't load what others did: {outcome.detail}")
                    del self._suspicions[engine_id]  # started anew it may try again
        elif not self._pins:
            told = sorted(self._suspicions.values(), key=lambda outcome: _CERTAINTY.index(outcome.verdict))[0]
            if told.verdict is not Verdict.SUSPECT or len(self._suspicions) > 1 or not self._other_opinions():
                reason = Reason.CKPT_MISSING if told.verdict is Verdict.NOT_VISIBLE else Reason.PIN_VIOLATION
                unheld = f" ({self.point.unheld})" if self.point.unheld is not None else ""
                self._condemn(LaneEnd(PointState.SKIPPED, reason, told.detail + unheld))

    def _other_opinions(self) -> bool:
        """Whether an engine that was not asked yet may come to tell."""
        return any(engine.hopeful and engine.id not in self._suspicions for engine in self.parts.fleet.leasable())

    def _condemn(self, why: Exception) -> None:
        if not self._condemned.done():
            self._condemned.set_result(why)

    # --- the life of an attempt

    def start(self) -> asyncio.Task[None]:
        """Begin; the task raises nothing, it ends with its outcome in the ledger."""
        self._route.set_target(self.point.id, [])
        self.task = asyncio.get_running_loop().create_task(self._live())
        return self.task

    def cancel(self) -> None:
        """The point has ended otherwise, or the controller stops: write nothing more."""
        self._condemn(Overtaken())

    async def _live(self) -> None:
        moves, write, point = self.parts.moves, self.parts.ledger.patiently, self.point.id
        work = asyncio.create_task(self._attempt())
        try:
            await self._unless_condemned(work)
        except (Overtaken, Fenced):
            pass
        except LaneEnd as exc:
            await self._leave(work)
            await write(moves.end, point, exc.state, exc.reason, exc.detail)
        except LaneFault as exc:
            await self._leave(work)
            await write(moves.requeue, point, exc.fault, exc.detail, sorted(self.pinner.evidence))
        except Exception as exc:
            log.exception("point %s: attempt %d", point, self.number)
            await self._leave(work)
            detail = f"{type(exc).__name__}: {exc}"
            await write(moves.requeue, point, "internal", detail, sorted(self.pinner.evidence))
        finally:
            await self._leave(work)

    async def _unless_condemned(self, work: asyncio.Task[None]) -> None:
        condemned: asyncio.Future[Any] = self._condemned
        await asyncio.wait([work, condemned], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise self._condemned.result()
        await work

    async def _leave(self, work: asyncio.Task[None]) -> None:
        """Nothing of the attempt goes on, and its engines are free before its end is written."""
        self.cancel()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        self._close()

    def _close(self) -> None:
        self._route.drop_target(self.point.id, abort=True)
        for engine_id in sorted(self.engines):
            self._let_go(engine_id)

    async def _attempt(self) -> None:
        began = self.parts.clock()
        if self._prompts.config.prompt_format == "chat":
            await self._render()  # while the first engine loads
        await self._first.wait()
        self._timings["pin_s"] = self.parts.clock() - began
        await self._advance(PointState.RUNNING)
        answers = await self._answers()
        self._close()
        await self._advance(PointState.SCORING)
        parts = self.parts
        judges = Judges(parts.fleet, parts.router, self.point.id)
        recorder = Recorder(self.point, self.number, self._prompts, parts.moves, parts.ledger, parts.scorers, judges)
        await recorder.record(answers, Weights(self.pinner.order.weight_version, self.pinner.proof()), self._timings)

    async def _render(self) -> None:
        try:
            async with self.parts.places.near(self.point.snapshot, self.point.digest) as place:
                prompts = await rendered_prompts(self._prompts, place, self.parts.scorers)
        except NoTemplate as exc:
            raise LaneEnd(PointState.SKIPPED, Reason.SNAPSHOT_INVALID, str(exc)) from exc
        self._generation.rendered(prompts)

    async def _answers(self) -> list[Answered]:
        began = self.parts.clock()
        try:
            answers = await self._generation.run()
        except* Spoiled as group:
            raise_fault(group)
        self._timings["generate_s"] = self.parts.clock() - began
        return answers

    async def _advance(self, state: PointState) -> None:
        if not await self.parts.ledger.patiently(self.parts.moves.advance, self.point.id, state):
            raise Overtaken
