"""Lanes that the proxy drives: an ended point's snapshot, served to whoever asks, by engines leased like any other's.

Invariants: an engine's requests are the proxy's or the controller's and never both, so it is given back only once the
proxy has let go of it; it serves only while it is proven to hold the snapshot. A serving has at least one engine to
begin with, later as many as its requests fill. While points wait, it gives up what it does not use; to one that has
waited too long, also what it uses: its requests wait then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from eval_service.contract.errors import Unavailable
from eval_service.contract.wire import EngineState
from eval_service.controller.board import Board
from eval_service.controller.costs import Costs
from eval_service.controller.db import LedgerThread
from eval_service.controller.fleet import Fleet
from eval_service.controller.pin_orders import PinMaker
from eval_service.controller.pinning import Pinner, Verdict
from eval_service.controller.scheduler import Claim
from eval_service.ledger.database import Fenced
from eval_service.ledger.moves import Runnable
from eval_service.ledger.servings import Outlook, ServingMoves
from router.upstream import Upstream

log = logging.getLogger(__name__)
SPARE_S = 5.0  # an engine that nobody asks anything of for so long (or for a pin, if that is longer) is spare


@dataclass(frozen=True, slots=True)
class ServedParts:
    """What servings work with. `slots` are requests in flight per engine."""

    fleet: Fleet
    board: Board
    costs: Costs
    slots: int
    on_change: Callable[[], None]
    clock: Callable[[], float] = time.monotonic


@dataclass(slots=True, eq=False)
class ServedLane:
    """One serving and its engines.

    `failed`: why an engine's last pin came to nothing. `refused`: engines that it may not have again, since it is this
    snapshot that they can't load; one that is itself at fault comes again when it is sound.
    """

    point: Runnable
    pinner: Pinner
    parts: ServedParts
    engines: set[str] = field(default_factory=set)
    proven: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    open: bool = True
    told: Outlook | None = None
    pins: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _proofs: int = 0
    _busy_at: float = field(init=False)
    _wanting_since: float = field(init=False)

    def __post_init__(self) -> None:
        self._busy_at = self._wanting_since = self.parts.clock()
        self.parts.board.open(self.point.id, self.point.vocab_size)

    # --- what the scheduler asks

    @property
    def claim(self) -> Claim:
        """What it has use for."""
        waited_s = self.parts.clock() - self._wanting_since
        return Claim(self.point, self._wants(), len(self.engines), frozenset(self.refused), waited_s)

    def _wants(self) -> int:
        return max(0, self._needed() - len(self.proven) - len(self.pins)) if self.open else 0

    def _needed(self) -> int:
        filled = -(-self.parts.board.demand(self.point.id) // self.parts.slots)
        return max(filled, 0 if self._proofs else 1)

    @property
    def outlook(self) -> Outlook:
        """What is told of it. Before the proxy has heard of it no engine serves it: there it is no lane till then."""
        detail = None if self.proven or not self.failed else "; ".join(sorted(set(self.failed.values())))
        engines = len(self.proven) if self.parts.board.known(self.point.id) else 0
        version = self.pinner.order.weight_version if engines else None
        return Outlook(engines, version, detail)

    # --- engines

    def join(self, engine_id: str) -> None:
        """Lease an engine to it."""
        self.engines.add(engine_id)
        self.parts.fleet.engines[engine_id].point = self.point.id
        self.pins[engine_id] = asyncio.get_running_loop().create_task(self._pin(engine_id))

    async def _pin(self, engine_id: str) -> None:
        try:
            outcome = await self.pinner.pin(engine_id)
            engine = self.parts.fleet.engines.get(engine_id)
            if outcome.verdict is not Verdict.PROVEN:
                self.failed[engine_id] = outcome.detail or str(outcome.verdict)
                if outcome.verdict is not Verdict.ENGINE:
                    self.refused.add(engine_id)
            elif self.open and engine is not None and engine.pinned is self.pinner.order:
                self._admit(engine_id)
        except Exception as exc:  # the task's edge: the engine is given back
            log.exception("serving of %s: pin of %s", self.point.id, engine_id)
            self.failed[engine_id] = f"{type(exc).__name__}: {exc}"
            self.refused.add(engine_id)
        finally:
            self.pins.pop(engine_id, None)
            self.settle()
            self.parts.on_change()

    def _admit(self, engine_id: str) -> None:
        self._proofs += 1
        self.failed.pop(engine_id, None)
        self._busy_at = self.parts.clock()
        report = self.parts.fleet.engines[engine_id].report
        headers = {"authorization": f"Bearer {report.api_key}"} if report.api_key else {}
        tells = {"X-Router-Weights": self.pinner.order.weight_version}
        self.parts.board.put(self.point.id, Upstream(engine_id, report.url or "", headers, self._proofs, tells))
        self.proven.add(engine_id)

    def part_with(self, engine_id: str) -> None:
        """It gets nothing more, and is given back as soon as the proxy has let go of it."""
        self.proven.discard(engine_id)
        self.parts.board.take(self.point.id, engine_id)
        if (pin := self.pins.get(engine_id)) is not None:
            pin.cancel()

    def look(self) -> None:
        """Part with engines that are gone, were started anew, were ejected or are leaving."""
        for engine_id in sorted(self.engines):
            engine = self.parts.fleet.engines.get(engine_id)
            away = engine is None or engine.lost or engine.report.state is EngineState.LEAVING
            stale = engine_id in self.proven and (
                self.parts.board.ejected(engine_id) or engine is None or engine.pinned is not self.pinner.order
            )
            if away or stale or not self.open:
                self.part_with(engine_id)
        if self._needed() >= len(self.proven):
            self._busy_at = self.parts.clock()
        self.settle()
        if self.engines or not self._wants():
            self._wanting_since = self.parts.clock()

    @property
    def leaving(self) -> set[str]:
        """Engines that are not back yet."""
        return self.engines - self.proven - self.pins.keys()

    def settle(self) -> None:
        """Give back what the proxy has let go of."""
        for engine_id in sorted(self.leaving):
            if self.parts.board.holds(engine_id):
                continue
            self.engines.discard(engine_id)
            engine = self.parts.fleet.engines.get(engine_id)
            if engine is not None:
                engine.pinned = None
                engine.point = None if engine.point == self.point.id else engine.point
            self.parts.on_change()

    def give_way(self, *, starving: bool, spare_s: float) -> None:
        """Points wait: part with engines that are not used, or with one that is."""
        if starving and self.proven:
            self.part_with(min(self.proven))
        elif self.parts.clock() - self._busy_at >= spare_s:
            for engine_id in sorted(self.proven)[self._needed() :]:
                self.part_with(engine_id)

    def close(self) -> None:
        """Requests are refused from here on."""
        if self.open:
            self.open = False
            self.parts.board.close(self.point.id)


class Serving:
    """All servings of a controller."""

    def __init__(
        self, parts: ServedParts, moves: ServingMoves, ledger: LedgerThread, pins: PinMaker, *, patience_s: float
    ) -> None:
        self.board = parts.board
        self._parts = parts
        self._moves = moves
        self._ledger = ledger
        self._pins = pins
        self._patience_s = patience_s
        self._made = 0
        self._unfit: set[str] = set()
        self.lanes: dict[str, ServedLane] = {}

    async def tick(self) -> bool:
        """Open what was asked for, end what is over, part with what is gone; whether a snapshot is needed no longer."""
        live, over = await self._ledger(self._moves.look)
        wanted = {point.id: point for point in live}
        for id_, lane in list(self.lanes.items()):
            if id_ not in wanted:
                lane.close()
            lane.look()
            if not lane.open and not lane.engines:
                del self.lanes[id_]
        self._unfit &= wanted.keys()
        for id_, point in wanted.items():
            if id_ not in self.lanes and id_ not in self._unfit:
                await self._begun(point)
        if ended := [point for point in over if point not in self.lanes]:
            await self._ledger(self._moves.forget, ended)
        for id_, lane in list(self.lanes.items()):
            if (outlook := lane.outlook) != lane.told:
                await self._ledger(self._moves.note, id_, outlook)
                lane.told = outlook
        return bool(ended)

    async def _begun(self, point: Runnable) -> None:
        """What can't be begun is told so, and keeps no other from being served."""
        try:
            await self._begin(point)
        except (Unavailable, Fenced):
            raise
        except Exception as exc:
            log.exception("point %s can't be served", point.id)
            self._unfit.add(point.id)
            told = Outlook(0, None, f"it can't be served: {type(exc).__name__}: {exc}")
            await self._ledger(self._moves.note, point.id, told)

    async def _begin(self, point: Runnable) -> None:
        self._made += 1
        manifest = await self._ledger(self._moves.manifest, point.id)
        pinner = self._pins.pinner(point, manifest, f"s{self._moves.epoch}-{self._made}")
        self.lanes[point.id] = ServedLane(point, pinner, self._parts)
        self._parts.on_change()

    def claims(self) -> list[Claim]:
        """What they have use for."""
        return [lane.claim for lane in self.lanes.values()]

    def give(self, point: str, engine_id: str) -> bool:
        """Lease an engine to a serving; False where it is none."""
        lane = self.lanes.get(point)
        if lane is None or not lane.open:
            return False
        engine = self._parts.fleet.engines.get(engine_id)
        if engine is not None and engine.free:
            lane.join(engine_id)
        return True

    def give_way(self, claims: Sequence[Claim], held: Mapping[str, int]) -> None:
        """No engine is free: points that have none, and may have one, come before what nobody uses here."""
        waiting = [claim for claim in claims if claim.wants and not claim.engines and _may_have_more(claim, held)]
        if not waiting or any(lane.leaving for lane in self.lanes.values()):
            return
        late = any(claim.waited_s >= self._patience_s / (2 if claim.point.force else 1) for claim in waiting)
        spare_s = max(SPARE_S, self._parts.costs.pin_s or 0.0)
        for number, lane in enumerate(sorted(self.lanes.values(), key=lambda lane: -len(lane.proven))):
            lane.give_way(starving=late and number == 0, spare_s=spare_s)

    async def close(self) -> None:
        """The controller stops acting: what is served goes on until the lease is over, or another one acts."""
        tasks = [task for lane in self.lanes.values() for task in lane.pins.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _may_have_more(claim: Claim, held: Mapping[str, int]) -> bool:
    quota = claim.point.max_engines
    return quota is None or held.get(claim.point.run, 0) < quota
