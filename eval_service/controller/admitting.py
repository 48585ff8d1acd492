"""Admission of snapshots: the checks run in a thread, one snapshot at a time each, before any engine is touched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from eval_service.admission.checks import Report, find_faults
from eval_service.admission.faults import Fault, FaultCode
from eval_service.contract.manifest import Manifest
from eval_service.contract.states import Reason
from eval_service.contract.wire import Source
from eval_service.controller.db import LedgerThread
from eval_service.fleet_config import ServiceConfig
from eval_service.ledger.moves import Facts, Moves, Unadmitted

AT_ONCE = 2  # snapshots checked at the same time: each reads every byte once
AGAIN_S = 1.0


class Admissions:
    """Checks what queued points wait for."""

    def __init__(self, service: ServiceConfig, moves: Moves, ledger: LedgerThread, wake: Callable[[], None]) -> None:
        self._service = service
        self._moves = moves
        self._ledger = ledger
        self._wake = wake
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}

    async def tick(self) -> None:
        """Start the checks of snapshots that have none running."""
        for snapshot in await self._ledger(self._moves.unadmitted):
            if len(self._tasks) >= AT_ONCE:
                return
            if snapshot.id in self._tasks or time.monotonic() < self._not_before.get(snapshot.id, 0.0):
                continue
            task = asyncio.get_running_loop().create_task(self._check(snapshot))
            self._tasks[snapshot.id] = task
            task.add_done_callback(partial(self._checked, snapshot.id))

    async def close(self) -> None:
        """Let go of the checks under way."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _checked(self, snapshot: str, _task: asyncio.Task[None]) -> None:
        self._tasks.pop(snapshot, None)
        self._wake()

    async def _check(self, snapshot: Unadmitted) -> None:
        try:
            report = await asyncio.to_thread(self._examine, snapshot)
        except Exception as exc:  # noqa: BLE001 - the task's edge: the points end with it
            fault = Fault(FaultCode.INVALID, "snapshot", f"the checks failed: {type(exc).__name__}: {exc}")
            await self._refuse(snapshot, fault, None)
            return
        if report.faults or report.manifest is None or report.facts is None:
            await self._refuse(snapshot, report.faults[0], report.manifest)
        else:
            await self._ledger(self._moves.admit, snapshot.id, Facts(report.manifest, report.facts.vocab_size))

    def _examine(self, snapshot: Unadmitted) -> Report:
        return find_faults(
            Path(snapshot.path),
            source=Source(snapshot.source),
            roots=self._service.roots,
            expect_digest=snapshot.claimed_digest,
            run=snapshot.run,
            step=snapshot.step,
            allow_auto_map=self._service.allow_auto_map,
        )

    async def _refuse(self, snapshot: Unadmitted, fault: Fault, manifest: Manifest | None) -> None:
        """What a shared file system may only be hiding is looked at again for a while; the rest ends here."""
        waited_s = time.time() - snapshot.queued_at
        missing = fault.code is FaultCode.MISSING
        if (missing or fault.may_appear) and waited_s < self._service.visibility_timeout_s:
            self._not_before[snapshot.id] = time.monotonic() + AGAIN_S
            return
        reason = Reason.CKPT_MISSING if missing else Reason.SNAPSHOT_INVALID
        await self._ledger(self._moves.refuse, snapshot.id, reason, str(fault.error()), manifest)
