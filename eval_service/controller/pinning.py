"""Bringing one engine to a lane's weights: two tries, then a restart and its last good snapshot, then a verdict.

Where the snapshot has a canary, each engine is proven by itself. Without one, engines are held to each other, and to
have come first is no proof: against one engine alone, another that was started anew and still disagrees makes it a
dispute, which neither wins; two that agree win against one.

The verdict says who is at fault. An engine that can't load what was loaded before is. A snapshot that fails again on an
engine that just loaded a good one is suspected on good grounds; where there is no good one to tell by, on weak grounds.
An engine may also die, hang or be unavailable by itself, so that alone must come twice after a proof. What differs from
try to try is no doing of what stays the same: it takes as many proofs, and is weak grounds then. The lane decides: it
knows what other engines made of the snapshot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path

from eval_service.contract.states import PinProof
from eval_service.controller.db import DaemonThreads
from eval_service.controller.engines import Good
from eval_service.controller.fleet import Fleet
from eval_service.engine.protocol import CommandKind, CommandResult, PinError, PinEvidence, PinOrder

TRIES = 2
PROOFS = 2  # of an engine, before a snapshot is held to be the cause of what may be the engine's own doing
_BY_ITSELF = (PinError.DIED, PinError.UNAVAILABLE, PinError.TIMEOUT)  # what befalls engines with sound snapshots too
THERE_S = 10.0  # to look whether a good snapshot is still there
_MARGIN_S = 10.0  # what a command's way there and back may take beyond its own deadline


class Verdict(StrEnum):
    """What became of a pin."""

    PROVEN = "proven"
    ENGINE = "engine"  # the engine is at fault, or gone; it was quarantined if it still answers
    SNAPSHOT = "snapshot"  # the engine loads a good snapshot and not this one
    SUSPECT = "suspect"  # the engine does not load this one, and may be at fault itself
    DISPUTED = "disputed"  # started anew it still disagrees with the only engine that holds the snapshot, or two do
    NOT_VISIBLE = "not_visible"  # its files did not reach the engine's node in time
    FENCED = "fenced"  # another controller acts


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict, with what was seen last."""

    verdict: Verdict
    evidence: PinEvidence | None = None
    detail: str = ""


@dataclass(slots=True)
class Pinner:
    """Pins the engines of one lane and keeps their evidence, which must agree exactly.

    `dissent` is the evidence of those that don't. `troubled` are engines whose first try failed: they may be long in
    coming.
    """

    fleet: Fleet
    order: PinOrder
    restart_timeout_s: float
    on_trouble: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    there: Callable[[str, str], bool] = lambda snapshot, digest: Path(snapshot).is_dir()  # could be loaded again
    threads: DaemonThreads = field(default_factory=lambda: DaemonThreads("pins"))
    evidence: dict[str, PinEvidence] = field(default_factory=dict)
    dissent: dict[str, PinEvidence] = field(default_factory=dict)
    troubled: set[str] = field(default_factory=set)
    seconds: float | None = None  # of the last pin that was proven

    async def pin(self, engine_id: str) -> Outcome:
        """Pin one engine, through every try that DESIGN allows it."""
        try:
            return await self._pin(engine_id)
        finally:
            self.troubled.discard(engine_id)

    def proof(self) -> PinProof:
        """How the lane's weights are proven, over all engines that joined it."""
        seen = list(self.evidence.values())
        if seen and all(evidence.canary_diff is not None for evidence in seen):
            return PinProof.CANARY
        if seen and all(evidence.fingerprint_kind == "checksum" for evidence in seen):
            return PinProof.CHECKSUM
        kinds = {evidence.fingerprint_kind for evidence in seen}  # of two kinds, none can be compared
        return PinProof.AGREEMENT if len(seen) > 1 and len(kinds) == 1 else PinProof.UNPROVEN

    async def _pin(self, engine_id: str) -> Outcome:
        last = CommandResult("", ok=False, error=PinError.DIED, detail="the engine did not serve")
        failures: list[PinError | None] = []
        for _ in range(TRIES):
            if not await self.fleet.wait_ready(engine_id, self.restart_timeout_s):
                return Outcome(Verdict.ENGINE, detail=last.detail or "the engine did not serve")
            last = await self._try(engine_id, self.order)
            if (outcome := self._conclusive(last)) is not None:
                return outcome
            failures.append(last.error)
            self.troubled.add(engine_id)
            self.on_trouble()
        return await self._restart_and_judge(engine_id, last, failures)

    async def _try(self, engine_id: str, order: PinOrder) -> CommandResult:
        if engine_id not in self.fleet.engines:
            return CommandResult("", ok=False, error=PinError.DIED, detail="the engine is gone")
        began = self.clock()
        future = self.fleet.send(engine_id, CommandKind.PIN, order)
        try:
            async with asyncio.timeout(order.timeout_s + order.visibility_timeout_s + _MARGIN_S):
                result = await future
        except TimeoutError:
            return CommandResult("", ok=False, error=PinError.TIMEOUT, detail="the engine did not answer in time")
        if result.ok and order is self.order:
            result = self._compared(engine_id, result)
            self.seconds = self.clock() - began
        return result

    def _compared(self, engine_id: str, result: CommandResult) -> CommandResult:
        """The engines of a lane must agree exactly."""
        assert result.evidence is not None
        for other, evidence in self.evidence.items():
            if other != engine_id and not _agree(evidence, result.evidence):
                self.fleet.engines[engine_id].pinned = None
                self.dissent[engine_id] = result.evidence
                detail = f"its fingerprint differs from that of {other}"
                return CommandResult(result.id, ok=False, error=PinError.DISAGREES, detail=detail)
        self.dissent.pop(engine_id, None)
        self.evidence[engine_id] = result.evidence
        self.fleet.prove(engine_id, Good(self.order, result.evidence))
        return result

    def _conclusive(self, result: CommandResult) -> Outcome | None:
        if result.ok:
            return Outcome(Verdict.PROVEN, result.evidence)
        detail = _told(result)
        if result.error is PinError.STALE_EPOCH:
            return Outcome(Verdict.FENCED, detail=detail)
        if result.error is PinError.NOT_VISIBLE:
            return Outcome(Verdict.NOT_VISIBLE, detail=detail)
        if result.error is PinError.STORE:  # no word on the engine, nor on the snapshot: it is leased again
            return Outcome(Verdict.ENGINE, detail=detail)
        if result.error is PinError.DISAGREES and self._outvoted():
            return Outcome(Verdict.DISPUTED, detail=f"two engines agree against it: {detail}")
        return None

    def _outvoted(self) -> bool:
        """Whether two engines agree, against one, on what the snapshot looks like."""
        told = list(self.dissent.values())
        agree = len(told) > 1 and all(_agree(told[0], other) for other in told)
        return self._contestable() and agree

    def parties(self) -> set[str]:
        """The engines of a dispute that may be wrong: all, unless two agree against one."""
        return set(self.evidence) if self._outvoted() else {*self.evidence, *self.dissent}

    def _contestable(self) -> bool:
        """Only one engine vouches for what the lane's engines are held to."""
        return len(self.evidence) == 1 and all(evidence.canary_diff is None for evidence in self.evidence.values())

    async def _restart_and_judge(self, engine_id: str, last: CommandResult, failures: list[PinError | None]) -> Outcome:
        good = await self._good(engine_id)
        again, alike = last, False
        for _ in range(PROOFS):
            fault = await self._restarted(engine_id)
            if fault is None and good is not None:
                holds = await self._holds(engine_id, good)
                fault = "it does not load a good snapshot any more" if holds is False else None
                good = good if holds else None  # it was deleted meanwhile, and tells nothing
            if fault is not None:
                return self._engines_fault(engine_id, f"{fault}, after a failed pin: {_told(again)}")
            again = await self._try(engine_id, self.order)
            if (outcome := self._conclusive(again)) is not None:
                return outcome
            failures.append(again.error)
            alike = failures.count(again.error) > 1
            if alike and again.error not in _BY_ITSELF:
                break
        return self._judged(engine_id, again, good, alike=alike)

    def _judged(self, engine_id: str, again: CommandResult, good: Good | None, *, alike: bool) -> Outcome:
        """Who is at fault where an engine that is sound, as far as can be told, failed again."""
        engine = self.fleet.engines.get(engine_id)
        if engine is None or engine.lost:  # whoever took the replica away, it was not its server that failed
            return Outcome(Verdict.ENGINE, detail=f"it was lost: {_told(again)}")
        if again.error is PinError.DISAGREES:
            if self._contestable():
                return Outcome(Verdict.DISPUTED, detail=f"started anew, {_told(again)}")
            return self._engines_fault(engine_id, _told(again))
        if again.error is PinError.LABEL:  # what it calls what it holds is no doing of what it holds
            return self._engines_fault(engine_id, _told(again))
        # Unchanged, it may load nothing at all: the good one may be what it boots with, or held anyway.
        proven, unchanged = self.order.manifest.digest in self.fleet.proven, again.error is PinError.UNCHANGED
        if proven and unchanged:  # bytes that went bad since would not leave it as it was
            return self._engines_fault(engine_id, _told(again))
        weak = good is None or proven or not alike or unchanged
        return Outcome(Verdict.SUSPECT if weak else Verdict.SNAPSHOT, detail=_told(again))

    def _engines_fault(self, engine_id: str, why: str) -> Outcome:
        self.fleet.quarantine(engine_id, why)
        return Outcome(Verdict.ENGINE, detail=why)

    async def _restarted(self, engine_id: str) -> str | None:
        """Start its server anew; what went wrong, None where nothing did. One that can't be has to do as it is."""
        engine = self.fleet.engines.get(engine_id)
        if engine is None or engine.lost:
            return "it was lost"
        future = self.fleet.send(engine_id, CommandKind.RESTART)
        try:
            async with asyncio.timeout(2 * self.restart_timeout_s + _MARGIN_S):
                result = await future
        except TimeoutError:
            return "it did not come back from a restart in time"
        if not result.ok and result.error is not PinError.REFUSED:
            return f"its restart failed ({result.detail})"
        if not await self.fleet.wait_ready(engine_id, self.restart_timeout_s):
            return "it did not serve after a restart"
        return None

    async def _good(self, engine_id: str) -> Good | None:
        """What the engine held last, else what any engine did, of other weights than these if any; None: nothing left.

        What this very lane believes is what is in question. These weights as they were proven to be held before are
        not: an engine that can't load them any more is at fault. Other weights are asked first, since they tell it from
        bytes that went bad on their storage; where there are none, it is blamed for those, and comes back.
        """
        engine = self.fleet.engines.get(engine_id)
        known = [
            good for good in (*(engine.goods if engine else ()), *self.fleet.goods) if good.order is not self.order
        ]
        known.sort(key=lambda good: good.order.manifest.tensor_digest == self.order.manifest.tensor_digest)
        places: dict[tuple[str, str], Good] = {}
        for good in known:
            places.setdefault((good.order.snapshot, good.order.manifest.digest), good)
        left = await asyncio.gather(*(self._left(good.order) for good in places.values()))
        return next((good for good, there in zip(places.values(), left, strict=True) if there), None)

    async def _left(self, order: PinOrder) -> bool:
        """Whether it could be loaded again: of storage that does not answer, or only with an error, nothing can."""
        try:
            async with asyncio.timeout(THERE_S):
                return await self.threads.run(partial(self.there, order.snapshot, order.manifest.digest))
        except OSError:  # TimeoutError too
            return False

    async def _holds(self, engine_id: str, good: Good) -> bool | None:
        """Whether it loads a good snapshot, and is then as it was found to be; None: there is nothing to load."""
        result = await self._try(engine_id, good.order)
        if result.error in (PinError.NOT_VISIBLE, PinError.STORE):
            return None
        if not result.ok or result.evidence is None:
            return False
        engine = self.fleet.engines.get(engine_id)
        own = engine is not None and any(good is one for one in engine.goods)
        if not own or good.evidence is None:  # others' hardware may count otherwise; it had to agree with a canary only
            return True
        return _agree(good.evidence, result.evidence)


def _agree(one: PinEvidence, other: PinEvidence) -> bool:
    """Whether two engines hold the same, as far as that can be compared."""
    return one.fingerprint_kind != other.fingerprint_kind or one.fingerprint == other.fingerprint


def _told(result: CommandResult) -> str:
    return f"{result.error}: {result.detail}"
