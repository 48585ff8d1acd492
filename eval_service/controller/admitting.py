"""Admission of snapshots: the checks run in threads of their own, before any engine is touched.

A file system that hangs holds up the snapshots that lie on it and no others: each run has its share of the threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from eval_service.admission.checks import Report, find_faults
from eval_service.admission.faults import Fault, FaultCode
from eval_service.contract.manifest import Manifest
from eval_service.contract.states import Reason
from eval_service.contract.wire import Source
from eval_service.controller.db import DaemonThreads, LedgerThread
from eval_service.fleet_config import ServiceConfig
from eval_service.ledger.moves import Facts, Moves, Unadmitted

log = logging.getLogger(__name__)
AT_ONCE = 2  # snapshots of one run that are checked at the same time: each reads every byte once
AT_ONCE_OVERALL = 16
AGAIN_S = 1.0


class Admissions:
    """Checks what queued points wait for."""

    def __init__(
        self,
        service: ServiceConfig,
        moves: Moves,
        ledger: LedgerThread,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._service = service
        self._clock = clock
        self._moves = moves
        self._ledger = ledger
        self._wake = wake
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._runs: Counter[str] = Counter()
        self._not_before: dict[str, float] = {}
        self._threads = DaemonThreads("admission")

    async def tick(self) -> None:
        """Start the checks of snapshots that have none running."""
        waiting = await self._ledger(self._moves.unadmitted)
        self._not_before = {s.id: self._not_before[s.id] for s in waiting if s.id in self._not_before}
        for snapshot in waiting:
            if len(self._tasks) >= AT_ONCE_OVERALL:
                return
            if snapshot.id not in self._tasks and self._may_start(snapshot):
                self._start(snapshot)

    async def close(self) -> None:
        """Let go of the checks under way."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _may_start(self, snapshot: Unadmitted) -> bool:
        due = time.monotonic() >= self._not_before.get(snapshot.id, 0.0)
        return due and self._runs[snapshot.run] < AT_ONCE

    def _start(self, snapshot: Unadmitted) -> None:
        self._runs[snapshot.run] += 1
        task = asyncio.get_running_loop().create_task(self._guarded(snapshot))
        self._tasks[snapshot.id] = task
        task.add_done_callback(partial(self._checked, snapshot))

    def _checked(self, snapshot: Unadmitted, _task: asyncio.Task[None]) -> None:
        self._tasks.pop(snapshot.id, None)
        self._runs[snapshot.run] -= 1
        self._wake()

    async def _guarded(self, snapshot: Unadmitted) -> None:
        """The task's edge: what was found is lost with a ledger that can't be written, and is looked for again."""
        try:
            await self._check(snapshot)
        except Exception:
            log.exception("admission of step %d of %s", snapshot.step, snapshot.run)
            self._not_before[snapshot.id] = time.monotonic() + AGAIN_S

    async def _check(self, snapshot: Unadmitted) -> None:
        try:
            report = await self._threads.run(lambda: self._examine(snapshot))
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
        waited_s = self._clock() - snapshot.queued_at
        missing = fault.code is FaultCode.MISSING
        if (missing or fault.may_appear) and waited_s < self._service.visibility_timeout_s:
            self._not_before[snapshot.id] = time.monotonic() + AGAIN_S
            return
        reason = Reason.CKPT_MISSING if missing else Reason.SNAPSHOT_INVALID
        await self._ledger(self._moves.refuse, snapshot.id, reason, str(fault.error()), manifest)
