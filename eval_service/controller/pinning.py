"""Bringing one engine to a lane's weights: two tries, then a restart and its last good snapshot, then a verdict.

The verdict says who is at fault. An engine that can't load what it held before is; a snapshot that fails again on an
engine that just loaded its last good one is, unless another engine of the lane has proven it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from eval_service.contract.states import PinProof
from eval_service.controller.fleet import Fleet
from eval_service.engine.protocol import CommandKind, CommandResult, PinError, PinEvidence, PinOrder

TRIES = 2
_MARGIN_S = 10.0  # what a command's way there and back may take beyond its own deadline


class Verdict(StrEnum):
    """What became of a pin."""

    PROVEN = "proven"
    ENGINE = "engine"  # the engine is at fault, or gone; it was quarantined if it still answers
    SNAPSHOT = "snapshot"  # the snapshot is at fault
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
    """Pins the engines of one lane and keeps their evidence, which must agree exactly."""

    fleet: Fleet
    order: PinOrder
    restart_timeout_s: float
    evidence: dict[str, PinEvidence] = field(default_factory=dict)

    async def pin(self, engine_id: str) -> Outcome:
        """Pin one engine, through every try that DESIGN allows it."""
        last = CommandResult("", ok=False, error=PinError.DIED, detail="the engine did not serve")
        for _ in range(TRIES):
            if not await self.fleet.wait_ready(engine_id, self.restart_timeout_s):
                return Outcome(Verdict.ENGINE, detail=last.detail or "the engine did not serve")
            last = await self._try(engine_id, self.order)
            if (outcome := self._conclusive(last)) is not None:
                return outcome
        return await self._restart_and_judge(engine_id, last)

    def proof(self) -> PinProof:
        """How the lane's weights are proven, over all engines that joined it."""
        seen = list(self.evidence.values())
        if seen and all(evidence.canary_diff is not None for evidence in seen):
            return PinProof.CANARY
        if seen and all(evidence.fingerprint_kind == "checksum" for evidence in seen):
            return PinProof.CHECKSUM
        return PinProof.AGREEMENT if len(seen) > 1 else PinProof.UNPROVEN

    async def _try(self, engine_id: str, order: PinOrder) -> CommandResult:
        engine = self.fleet.engines[engine_id]
        future = self.fleet.send(engine_id, CommandKind.PIN, order)
        try:
            result = await asyncio.wait_for(future, order.timeout_s + order.visibility_timeout_s + _MARGIN_S)
        except TimeoutError:
            engine.pending.pop(next(iter(engine.pending), ""), None)
            return CommandResult("", ok=False, error=PinError.TIMEOUT, detail="the engine did not answer in time")
        if result.ok and order is self.order:
            result = self._compared(engine_id, result)
        engine.pinned = order if result.ok else None
        if result.ok:
            engine.last_good = order
        return result

    def _compared(self, engine_id: str, result: CommandResult) -> CommandResult:
        """The engines of a lane must agree exactly; the first one sets what the others are held to."""
        assert result.evidence is not None
        for other, evidence in self.evidence.items():
            if evidence.fingerprint_kind == result.evidence.fingerprint_kind and (
                evidence.fingerprint != result.evidence.fingerprint
            ):
                detail = f"its fingerprint differs from that of {other}"
                return CommandResult(result.id, ok=False, error=PinError.CANARY, detail=detail)
        self.evidence[engine_id] = result.evidence
        return result

    def _conclusive(self, result: CommandResult) -> Outcome | None:
        if result.ok:
            return Outcome(Verdict.PROVEN, result.evidence)
        detail = f"{result.error}: {result.detail}"
        if result.error is PinError.STALE_EPOCH:
            return Outcome(Verdict.FENCED, detail=detail)
        if result.error is PinError.NOT_VISIBLE:
            return Outcome(Verdict.NOT_VISIBLE, detail=detail)
        return None

    async def _restart_and_judge(self, engine_id: str, last: CommandResult) -> Outcome:
        detail = f"{last.error}: {last.detail}"
        good = self.fleet.engines[engine_id].last_good if engine_id in self.fleet.engines else None
        if not await self._restarted(engine_id) or not await self._holds(engine_id, good):
            self.fleet.quarantine(engine_id, f"after a failed pin: {detail}")
            return Outcome(Verdict.ENGINE, detail=detail)
        again = await self._try(engine_id, self.order)
        if (outcome := self._conclusive(again)) is not None:
            return outcome
        if self.evidence:
            self.fleet.quarantine(engine_id, f"it can't load what others did: {again.error}: {again.detail}")
            return Outcome(Verdict.ENGINE, detail=f"{again.error}: {again.detail}")
        return Outcome(Verdict.SNAPSHOT, detail=f"{again.error}: {again.detail}")

    async def _restarted(self, engine_id: str) -> bool:
        if engine_id not in self.fleet.engines or self.fleet.engines[engine_id].lost:
            return False
        future = self.fleet.send(engine_id, CommandKind.RESTART)
        try:
            result = await asyncio.wait_for(future, self.restart_timeout_s)
        except TimeoutError:
            return False
        return result.ok and await self.fleet.wait_ready(engine_id, self.restart_timeout_s)

    async def _holds(self, engine_id: str, good: PinOrder | None) -> bool:
        """Whether it loads its last good snapshot; where that is gone, that it serves its boot model has to do."""
        if good is None or not Path(good.snapshot).is_dir():
            return True
        return (await self._try(engine_id, good)).ok
