"""Admission of snapshots: the checks run in threads of their own, before any engine is touched.

A file system that hangs holds up the snapshots that lie on it and no others: each run has its share of the threads.
What is not ours to keep is held by hard links as soon as it is queued, and is checked, and later loaded, by these.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from eval_service.admission.checks import Report, find_faults
from eval_service.admission.faults import Fault, FaultCode
from eval_service.admission.links import Linked, hold
from eval_service.contract import names
from eval_service.contract.errors import SnapshotFault, StoreUnavailable
from eval_service.contract.manifest import Manifest
from eval_service.contract.states import Reason
from eval_service.contract.wire import Source
from eval_service.controller.db import LedgerThread, NotBegun
from eval_service.controller.run_threads import RunThreads, StorageHangs
from eval_service.fleet_config import ServiceConfig
from eval_service.ledger.moves import Facts, Moves, Unadmitted
from eval_service.objects.places import Places
from eval_service.objects.urls import is_url, last_of

log = logging.getLogger(__name__)
AT_ONCE = 2  # snapshots of one run that are checked at the same time: each reads every byte once
AGAIN_S = 1.0
STORE_AGAIN_S = 5.0
LINK_S = 60.0  # for the hard links of one snapshot


@dataclass(frozen=True, slots=True)
class Examined:
    """What the checks found, of what is held by hard links or of what lies elsewhere."""

    report: Report
    held: bool
    vanished: bool  # it is at fault, and its own directory is gone


class Admissions:
    """Checks what queued points wait for.

    Args:
        wake: called when a look was taken: there may be something to do now.
        settled: called when points ended with what was found.
    """

    def __init__(
        self,
        service: ServiceConfig,
        moves: Moves,
        ledger: LedgerThread,
        wake: Callable[[], None],
        places: Places,
        clock: Callable[[], float] = time.time,
        *,
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        self._settled = settled
        self._service = service
        self._clock = clock
        self._moves = moves
        self._ledger = ledger
        self._wake = wake
        self._places = places
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}
        self._checks = RunThreads("admission", share=AT_ONCE)
        self._links = RunThreads("links", share=AT_ONCE)

    async def tick(self) -> None:
        """Start the checks of snapshots that have none running, and let go of those that no point waits for."""
        waiting = {snapshot.id: snapshot for snapshot in await self._ledger(self._moves.unadmitted)}
        self._not_before = {id_: at for id_, at in self._not_before.items() if id_ in waiting}
        for id_ in self._tasks.keys() - waiting.keys():
            self._tasks[id_].cancel()  # its points have ended; the thread, which may hang, goes on unheard
        for snapshot in waiting.values():
            if snapshot.id not in self._tasks and self._may_start(snapshot):
                self._start(snapshot)

    async def close(self) -> None:
        """Let go of the checks under way."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _may_start(self, snapshot: Unadmitted) -> bool:
        if time.monotonic() < self._not_before.get(snapshot.id, 0.0):
            return False
        threads = self._links if _is_to_hold(snapshot) else self._checks
        return threads.free(snapshot.run) and self._under_way(snapshot) < AT_ONCE

    def _under_way(self, snapshot: Unadmitted) -> int:
        """How many tasks of its run do what it would do."""
        kind = _task_name(snapshot)
        return sum(task.get_name() == kind for task in self._tasks.values())

    def _start(self, snapshot: Unadmitted) -> None:
        work = self._hold if _is_to_hold(snapshot) else self._check
        task = asyncio.get_running_loop().create_task(self._guarded(snapshot, work), name=_task_name(snapshot))
        self._tasks[snapshot.id] = task
        task.add_done_callback(partial(self._checked, snapshot))

    def _checked(self, snapshot: Unadmitted, _task: asyncio.Task[None]) -> None:
        self._tasks.pop(snapshot.id, None)
        self._wake()

    async def _guarded(self, snapshot: Unadmitted, work: Callable[[Unadmitted], Awaitable[None]]) -> None:
        """The task's edge: what was found is lost with a ledger that can't be written, and is looked for again."""
        try:
            await work(snapshot)
        except StorageHangs:
            self._not_before[snapshot.id] = time.monotonic() + AGAIN_S
        except StoreUnavailable as exc:
            log.warning("admission of step %d of %s: %s; it is tried again", snapshot.step, snapshot.run, exc)
            self._not_before[snapshot.id] = time.monotonic() + STORE_AGAIN_S
        except Exception:
            log.exception("admission of step %d of %s", snapshot.step, snapshot.run)
            self._not_before[snapshot.id] = time.monotonic() + AGAIN_S

    async def _hold(self, snapshot: Unadmitted) -> None:
        """Link it before its owner removes it. The ledger knows the place first, so that nothing is left behind."""
        links = names.run_dir(snapshot.root, snapshot.run) / names.held_name(uuid.uuid4().hex)
        await self._ledger(self._moves.note_links, snapshot.id, str(links))
        try:
            linked = await self._links.run(snapshot.run, lambda: self._linked(snapshot, links), timeout_s=LINK_S)
        except StorageHangs:
            await self._ledger(self._moves.forget_links, snapshot.id)
            raise
        except TimeoutError as exc:
            linked = Linked(Path(snapshot.path), str(exc))
        if linked.why_not is not None:
            log.warning("step %d of %s: %s", snapshot.step, snapshot.run, linked.why_not)
            await self._ledger(self._moves.note_links, snapshot.id, str(links), linked.why_not)

    def _linked(self, snapshot: Unadmitted, links: Path) -> Linked:
        source, roots = Source(snapshot.source), self._service.roots
        return hold(Path(snapshot.path), links, source=source, roots=roots)

    async def _check(self, snapshot: Unadmitted) -> None:
        # A snapshot may be large, so that only its points' own deadline bounds the look at it.
        timeout_s = 2 * self._service.point_timeout_s
        try:
            found = await self._checks.run(snapshot.run, lambda: self._examine(snapshot), timeout_s=timeout_s)
        except (StorageHangs, StoreUnavailable, NotBegun):
            raise
        except TimeoutError as exc:
            await self._refuse(snapshot, Fault(FaultCode.MISSING, "snapshot", str(exc)), None)
            return
        except Exception as exc:  # noqa: BLE001 - the task's edge: the points end with it
            fault = Fault(FaultCode.INVALID, "snapshot", f"the checks failed: {type(exc).__name__}: {exc}")
            await self._refuse(snapshot, fault, None)
            return
        report = found.report
        if report.faults or report.manifest is None or report.facts is None:
            await self._refuse(snapshot, report.faults[0], report.manifest, vanished=found.vanished)
        else:
            if snapshot.links is not None and not found.held:
                why_not = snapshot.why_not or "it could not be held by hard links"
                await self._ledger(self._moves.note_links, snapshot.id, snapshot.links, why_not)
            await self._ledger(self._moves.admit, snapshot.id, Facts(report.manifest, report.facts.vocab_size))

    def _examine_object(self, snapshot: Unadmitted) -> Examined:
        """Fetch it into this node's cache, which compares every byte, and check it there."""
        try:
            lease = self._places.hold(snapshot.path, snapshot.claimed_digest)
        except SnapshotFault as exc:
            report = Report(Path(last_of(snapshot.path)), None, None, (Fault.of(exc),))
            return Examined(report, held=False, vanished=False)
        try:
            report = self._find_faults(snapshot, lease.path, last_of(snapshot.path), (lease.path.parent,))
        finally:
            lease.release()
        return Examined(report, held=False, vanished=False)

    def _examine(self, snapshot: Unadmitted) -> Examined:
        if is_url(snapshot.path):
            return self._examine_object(snapshot)
        directory = path = Path(snapshot.path)
        if snapshot.links is not None and snapshot.why_not is None:
            directory = self._linked(snapshot, Path(snapshot.links)).directory  # files may have come since
        report = self._find_faults(snapshot, directory, path.name, self._service.roots)
        return Examined(report, held=directory != path, vanished=bool(report.faults) and not path.is_dir())

    def _find_faults(self, snapshot: Unadmitted, directory: Path, name: str, roots: Sequence[Path]) -> Report:
        return find_faults(
            directory,
            known_as=name,
            source=Source(snapshot.source),
            roots=roots,
            expect_digest=snapshot.claimed_digest,
            run=snapshot.run,
            step=snapshot.step,
            allow_auto_map=self._service.allow_auto_map,
        )

    async def _refuse(
        self, snapshot: Unadmitted, fault: Fault, manifest: Manifest | None, *, vanished: bool = False
    ) -> None:
        """What a shared file system may only be hiding is looked at again for a while; the rest ends here."""
        waited_s = self._clock() - snapshot.queued_at
        missing = fault.code is FaultCode.MISSING or vanished
        if (missing or fault.may_appear) and waited_s < self._service.visibility_timeout_s:
            self._not_before[snapshot.id] = time.monotonic() + AGAIN_S
            return
        reason = Reason.CKPT_MISSING if missing else Reason.SNAPSHOT_INVALID
        await self._ledger(self._moves.refuse, snapshot.id, reason, str(fault.error()), manifest)
        self._settled()


def _is_to_hold(snapshot: Unadmitted) -> bool:
    return snapshot.source != Source.STAGING and snapshot.links is None and not is_url(snapshot.path)


def _task_name(snapshot: Unadmitted) -> str:
    return f"{'hold' if _is_to_hold(snapshot) else 'check'}: run {snapshot.run}"
