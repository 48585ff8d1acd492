"""One snapshot in one engine of its own: loaded as a point's pin would load it, and held against its canary.

For `evalfleet doctor --engine`. The engine is ended in any case.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval_service.admission.faults import Fault, FaultCode
from eval_service.contract.canary import canary_token_ids
from eval_service.contract.manifest import Manifest
from eval_service.contract.states import PinProof
from eval_service.engine.errors import BootFailed, EngineError
from eval_service.engine.pin import PinFailed, SystemClock
from eval_service.engine.protocol import PinError, PinEvidence, PinOrder
from eval_service.engine.server import BootOptions, Server, boot_server
from eval_service.fleet_config import GroupConfig

PIN_TIMEOUT_S = 300.0
_HINTS = {
    PinError.CANARY: "the export is not what the trainer held (a tensor dropped, swapped or cast?); export it anew",
    PinError.DIED: "a tensor that the engine can't take ends it; compare shapes with config.json",
    PinError.REFUSED: "the engine says why",
}


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of it. `proof`: `canary` where the trainer's log-probs were reproduced, else `unproven`."""

    grade: str
    proof: PinProof | None = None
    canary_diff: float | None = None
    boot_s: float | None = None
    load_s: float | None = None
    faults: tuple[Fault, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """It was loaded, and is what its canary says."""
        return not self.faults


async def try_out(
    snapshot: Path, manifest: Manifest, group: GroupConfig, *, log: Path, overrides: Mapping[str, Any] | None = None
) -> Trial:
    """Boot an engine of the group and pin the snapshot into it.

    Args:
        group: boots with its own model; with the snapshot itself where that is its model.
        overrides: the fleet's, of SGLang's arguments.

    Raises:
        ConfigError: no engine can be started as configured.
        BootFailed: the engine of a group with another model did not start: nothing is known of the snapshot.
    """
    began = time.monotonic()
    try:
        server = await boot_server(group, BootOptions(log=log, fleet_overrides=overrides or {}), SystemClock())
    except BootFailed as exc:
        if group.model != snapshot:
            raise
        return Trial(group.grade, faults=(_fault(f"no engine starts with it: {exc}", "the engine's log says why"),))
    try:
        return await _pinned(server, snapshot, manifest, group.grade, time.monotonic() - began)
    finally:
        await server.stop()


async def _pinned(server: Server, snapshot: Path, manifest: Manifest, grade: str, boot_s: float) -> Trial:
    order = PinOrder(str(snapshot), manifest, f"{manifest.digest[:8]}.doctor", timeout_s=PIN_TIMEOUT_S)
    try:
        evidence: PinEvidence = await server.pinner.pin(order)
        row = canary_token_ids(server.model.vocab_size, rows=1)[0]
        seen = await server.api.input_logprobs(row)
    except PinFailed as exc:
        hint = _HINTS.get(exc.error, "try it again; the engine's log says more")
        return Trial(grade, boot_s=boot_s, faults=(_fault(f"the pin fails ({exc.error}): {exc.detail}", hint),))
    except EngineError as exc:
        return Trial(grade, boot_s=boot_s, faults=(_fault(f"it was loaded and can't answer: {exc}", None),))
    faults: tuple[Fault, ...] = ()
    if not all(math.isfinite(value) for value in seen):
        faults = (_fault("its log-probs are not finite", "has the training diverged?"),)
    proof = PinProof.UNPROVEN if evidence.canary_diff is None else PinProof.CANARY
    return Trial(grade, proof, evidence.canary_diff, boot_s, evidence.load_s, faults)


def _fault(message: str, hint: str | None) -> Fault:
    return Fault(FaultCode.INVALID, "engine", message, hint)
