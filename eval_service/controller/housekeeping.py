"""What goes on beside the points: the scan of the runs' roots, and the deletion of snapshots nobody needs.

Both run in threads, one at a time each, so that neither a slow file system nor 20,000 files stall the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from eval_service.contract.errors import EvalfleetError, SnapshotFault
from eval_service.contract.manifest import read_manifest
from eval_service.controller.db import DaemonThreads, LedgerThread
from eval_service.fleet_config import ServiceConfig
from eval_service.gc.collect import Refused, collect, find_leftovers, remove_leftover, remove_results
from eval_service.gc.plan import plan_deletions, plan_leftovers
from eval_service.intake import Scan, scan_run
from eval_service.ledger.intents import Intents
from eval_service.ledger.retention import Retention, RunPlace

log = logging.getLogger(__name__)
LEFTOVERS_EVERY_S = 300.0
CHECKPOINT_S = 5.0  # what a power cut may take of what was answered
SCAN_S = 60.0  # for one run's directory; a file system that hangs holds up the runs that lie on it and no others
AGAIN_S = 1.0  # after something that the file system or the ledger would not have


class Housekeeping:
    """Scans and deletes.

    Args:
        loading: directories that engines load now, for a point or to find out what an engine is worth.
    """

    def __init__(
        self,
        service: ServiceConfig,
        intents: Intents,
        retention: Retention,
        ledger: LedgerThread,
        *,
        loading: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        self._service = service
        self._loading = loading
        self._intents = intents
        self._retention = retention
        self._ledger = ledger
        self._next_scan = 0.0
        self._next_leftovers = 0.0
        self._next_checkpoint = 0.0
        self._collect = True
        self._collect_at = float("-inf")
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._scanning: set[str] = set()  # runs whose directory a thread looks into, or hangs at
        self._scan_threads = DaemonThreads("scan")
        self._checkpoint_threads = DaemonThreads("checkpoint")

    def something_settled(self) -> None:
        """A point ended: there may be something to delete."""
        self._collect = True

    async def tick(self) -> None:
        """Start what is due and not running."""
        now = time.monotonic()
        if now >= self._next_scan and self._start("scan", self._scan):
            self._next_scan = now + self._service.scan_interval_s
            self._collect = True  # whatever else may have changed: a hold was released, `keep` is lower
        if now >= self._next_leftovers and self._start("leftovers", self._sweep):
            self._next_leftovers = now + min(LEFTOVERS_EVERY_S, self._service.leftover_idle_s)
        if now >= self._next_checkpoint and self._start("checkpoint", self._checkpoint):
            self._next_checkpoint = now + CHECKPOINT_S
        if self._collect and now >= self._collect_at and self._start("collect", self._collect_settled):
            self._collect = False

    async def close(self) -> None:
        """Let go of what runs; a deletion that is cut short is taken up again."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        if name in self._tasks:
            return False
        task = asyncio.get_running_loop().create_task(self._guarded(name, work))
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name, None))
        return True

    async def _guarded(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except (EvalfleetError, OSError) as exc:
            log.warning("%s: %s; it is tried again", name, exc)
            if work == self._collect_settled:
                self._collect, self._collect_at = True, time.monotonic() + AGAIN_S
        except Exception:
            log.exception("%s; it is tried again with the next occasion", name)

    # --- what nobody sent

    async def _scan(self) -> None:
        for place in await self._ledger(self._retention.places):
            if place.deleting or place.run in self._scanning:
                continue
            with _alone("scan", place.run):
                look = self._scan_threads.run(partial(self._look, place))
                await self._take_in(await asyncio.wait_for(look, SCAN_S))

    def _look(self, place: RunPlace) -> Scan:
        self._scanning.add(place.run)
        try:
            return scan_run(place.root, place.run, self._retention.has)
        finally:
            self._scanning.discard(place.run)

    async def _take_in(self, scan: Scan) -> None:
        for damaged in scan.damaged:
            log.warning("scan: %s: %s", damaged.path, damaged.message)
        for path in scan.sent:
            await self._drop(path)
        for item in scan.found:
            try:
                await asyncio.to_thread(self._intents.dispatch, item.request.model_copy(update={"deferred": True}))
            except EvalfleetError as exc:
                log.warning("scan: %s can't be taken in: %s", item.path, exc)
                continue
            if item.in_outbox:
                await self._drop(item.path)

    async def _drop(self, path: Path) -> None:
        """One that can't be removed is known, and found again with the next scan."""
        try:
            await asyncio.to_thread(path.unlink, missing_ok=True)
        except OSError as exc:
            log.warning("scan: %s can't be removed: %s", path, exc.strerror)

    # --- what nobody needs

    async def _collect_settled(self) -> None:
        places = {place.run: place for place in await self._ledger(self._retention.places)}
        await self._describe()
        rows = await self._ledger(self._retention.on_storage)
        refused = set()
        for deletion in plan_deletions(rows, {run: place.keep for run, place in places.items()}):
            if not await self._ledger(self._retention.claim, deletion.id) or deletion.path in self._loading():
                self._collect = True  # somebody came to need it, or may: look again
                continue
            try:
                await asyncio.to_thread(collect, deletion, places[deletion.run].root)
            except Refused as exc:
                log.warning("gc: step %d of %s is left: %s", deletion.step, deletion.run, exc)
                refused.add(deletion.id)
                continue
            except OSError as exc:
                log.warning("gc: step %d of %s: %s; it is tried again", deletion.step, deletion.run, exc)
                self._collect, self._collect_at = True, time.monotonic() + AGAIN_S
                continue
            await self._ledger(self._retention.deleted, deletion.id)
        for place in places.values():
            if place.deleting:
                with _alone("gc", place.run):
                    await self._delete_run(place, refused)

    async def _describe(self) -> None:
        """Read the nonce of exports whose points ended before the checks, so that they can be told to be ours."""
        for snapshot in await self._ledger(self._retention.undescribed):
            with contextlib.suppress(SnapshotFault):  # not there, or damaged: it is left alone
                manifest = await asyncio.to_thread(read_manifest, snapshot.path)
                await self._ledger(self._retention.describe, snapshot, manifest)

    async def _delete_run(self, place: RunPlace, refused: Collection[str]) -> None:
        left = plan_deletions(await self._ledger(self._retention.on_storage), {place.run: 0})
        if any(deletion.id not in refused for deletion in left):
            return
        await asyncio.to_thread(remove_results, place.root, place.run)
        if not await self._ledger(self._retention.forget, place.run):
            self._collect = True

    async def _checkpoint(self) -> None:
        """In a thread of its own: the disk may take long, and nobody else need wait for it."""
        await self._checkpoint_threads.run(self._retention.tend)

    async def _sweep(self) -> None:
        await self._ledger(self._retention.forget_events)
        reserved = await self._ledger(self._retention.reserved_runs)
        for place in await self._ledger(self._retention.places):
            with _alone("leftovers", place.run):
                found = await asyncio.to_thread(find_leftovers, place.root, place.run)
                for leftover in plan_leftovers(found, reserved, now=time.time(), idle_s=self._service.leftover_idle_s):
                    await asyncio.to_thread(remove_leftover, leftover, place.root)


@contextlib.contextmanager
def _alone(what: str, run: str) -> Iterator[None]:
    """What is wrong with one run's directory hinders no other run."""
    try:
        yield
    except (EvalfleetError, OSError) as exc:
        log.warning("%s: run %s: %s; it is tried again", what, run, str(exc) or type(exc).__name__)
