"""What goes on beside the points: the scan of the runs' roots, and the deletion of snapshots nobody needs.

Each run has tasks and threads of its own, one of a kind at a time, so that neither a file system that hangs under one
run nor 20,000 files of another stall anything else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from eval_service.contract.errors import ConfigError, EvalfleetError, SnapshotFault, StoreUnavailable
from eval_service.controller.db import DaemonThreads, LedgerThread
from eval_service.controller.run_threads import RunThreads
from eval_service.fleet_config import ServiceConfig
from eval_service.gc.collect import (
    Refused,
    collect,
    find_leftovers,
    remove_held,
    remove_leftover,
    remove_results,
    tend_trash,
)
from eval_service.gc.objects import collect_objects, manifest_of, sweep
from eval_service.gc.plan import Deletion, LeftoverKind, plan_deletions, plan_leftovers
from eval_service.intake import Found, Scan, scan_run
from eval_service.ledger.intents import Intents
from eval_service.ledger.retention import Held, Retention, RunPlace, Undescribed
from eval_service.objects.places import Places
from eval_service.objects.urls import is_url

log = logging.getLogger(__name__)
LEFTOVERS_EVERY_S = 300.0
SCAN_S = 60.0  # for one look at one run's directory
DELETE_S = 600.0  # for one deletion
CHECKPOINT_S = 5.0  # what a power cut may take of what was answered
AGAIN_S = 1.0  # after something that the file system or the ledger would not have
CLOSE_S = 0.5  # for a deletion under way at the end: Serve kills a controller after `controller_grace_s`, 1.5 s
_Work = Callable[[], Coroutine[Any, Any, None]]
_State = tuple[int, frozenset[str]]  # the ledger's number; what is pinned


class Housekeeping:
    """Scans and deletes.

    Args:
        loading: directories that engines load now, for a point or to find out what an engine is worth.
        pinned: directories that engines hold the weights of.
        changes: a number that is another one once the ledger was written to; None: nobody knows.
        places: where snapshots in object stores are.
    """

    def __init__(
        self,
        service: ServiceConfig,
        intents: Intents,
        retention: Retention,
        ledger: LedgerThread,
        *,
        loading: Callable[[], Collection[str]] = frozenset,
        pinned: Callable[[], Collection[str]] = frozenset,
        changes: Callable[[], int | None] = lambda: None,
        places: Places | None = None,
    ) -> None:
        self._places = places or Places()
        self._service = service
        self._loading = loading
        self._pinned = pinned
        self._changes = changes
        self._intents = intents
        self._retention = retention
        self._ledger = ledger
        self._next_scan = 0.0
        self._next_leftovers = 0.0
        self._next_checkpoint = 0.0
        self._collect = True
        self._collect_at = float("-inf")
        self._look = False  # for what is to be deleted, if anything changed
        self._nothing_at: _State | None = None  # as things stood when there was nothing to delete
        self._letting_go: dict[str, list[Held]] = defaultdict(list)
        self._again: set[str] = set()  # runs that were planned for while their last plan was carried out
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._alone: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # a run's deletions go one after another
        self._scans = RunThreads("scan")
        self._deletions = RunThreads("gc")
        self._closing = False
        self._checkpoint_threads = DaemonThreads("checkpoint")
        self._cache_threads = DaemonThreads("objects")

    def something_settled(self) -> None:
        """A point ended: there may be something to delete."""
        self._collect = True

    async def tick(self) -> None:
        """Start what is due and not running."""
        now = time.monotonic()
        if now >= self._next_scan and self._start("scan", self._scan):
            self._next_scan = now + self._service.scan_interval_s
            self._look = True  # whatever else may have changed: a hold was released, `keep` is lower
        if now >= self._next_leftovers and self._start("leftovers", self._sweep):
            self._next_leftovers = now + min(LEFTOVERS_EVERY_S, self._service.leftover_idle_s)
        if now >= self._next_checkpoint and self._start("checkpoint", self._checkpoint):
            self._next_checkpoint = now + CHECKPOINT_S
        due = (self._collect or self._look) and now >= self._collect_at
        if due and self._start("collect", partial(self._collect_settled, anyway=self._collect)):
            self._collect = self._look = False

    async def close(self) -> None:
        """Let go of what runs; a deletion under way has a moment to end, and is taken up again if it has not."""
        self._closing = True
        if deleting := [task for name, task in self._tasks.items() if name.startswith("collect: ")]:
            await asyncio.wait(deleting, timeout=CLOSE_S)
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, name: str, work: _Work) -> bool:
        if (running := self._tasks.get(name)) is not None and not running.done():
            return False  # one that is done, and is only to be taken out yet, looks at nothing any more
        task = asyncio.get_running_loop().create_task(self._guarded(name, work))
        self._tasks[name] = task
        task.add_done_callback(partial(self._over, name))
        return True

    def _over(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]

    async def _guarded(self, name: str, work: _Work) -> None:
        """The task's edge: what is wrong with one run's directory, or with the ledger now, hinders nothing else."""
        try:
            await work()
        except (EvalfleetError, OSError) as exc:
            log.warning("%s: %s; it is tried again", name, str(exc) or type(exc).__name__)
            if name.startswith("collect"):
                self._collect_again()
        except Exception:
            log.exception("%s; it is tried again with the next occasion", name)

    def _collect_again(self) -> None:
        self._collect, self._collect_at = True, time.monotonic() + AGAIN_S

    # --- what nobody sent

    async def _scan(self) -> None:
        for place in await self._ledger(self._retention.places):
            if not place.deleting and self._scans.free(place.run):
                self._start(f"scan: run {place.run}", partial(self._scan_run, place))

    async def _scan_run(self, place: RunPlace) -> None:
        look = partial(scan_run, place.root, place.run, self._retention.has)
        scan: Scan = await self._scans.run(place.run, look, timeout_s=SCAN_S)
        for damaged in scan.damaged:
            log.warning("scan: %s: %s", damaged.path, damaged.message)
        for path in scan.sent:
            await self._drop(place.run, path)
        for item in scan.found:
            await self._take_in(place.run, item)

    async def _take_in(self, run: str, item: Found) -> None:
        request = item.request.model_copy(update={"deferred": True})
        try:
            await self._scans.run(run, partial(self._intents.dispatch, request), timeout_s=SCAN_S)
        except EvalfleetError as exc:
            log.warning("scan: %s can't be taken in: %s", item.path, exc)
            return
        if item.in_outbox:
            await self._drop(run, item.path)

    async def _drop(self, run: str, path: Path) -> None:
        """One that can't be removed is known, and found again with the next scan."""
        try:
            await self._scans.run(run, partial(path.unlink, missing_ok=True), timeout_s=SCAN_S)
        except OSError as exc:
            log.warning("scan: %s can't be removed: %s", path, exc.strerror or exc)

    # --- what nobody needs

    async def _collect_settled(self, *, anyway: bool) -> None:
        """Plan, and start what is planned for each run whose storage answers; not where there was nothing just so."""
        number, pinned = await self._ledger(self._changes), frozenset(self._pinned())
        state = None if number is None else (number, pinned)
        if not anyway and state is not None and state == self._nothing_at:
            return
        places = {place.run: place for place in await self._ledger(self._retention.places)}
        for held in await self._ledger(self._retention.let_go):
            self._letting_go[held.run].append(held)
        undescribed: dict[str, list[Undescribed]] = defaultdict(list)
        for snapshot in await self._ledger(self._retention.undescribed):
            undescribed[snapshot.run].append(snapshot)
        planned: dict[str, list[Deletion]] = defaultdict(list)
        rows = await self._ledger(self._retention.on_storage, pinned)
        objects = [run for run, place in places.items() if place.collect_objects]
        for deletion in plan_deletions(rows, {run: place.keep for run, place in places.items()}, objects):
            planned[deletion.run].append(deletion)
        deleting = {run for run, place in places.items() if place.deleting}
        letting_go = {run for run, waiting in self._letting_go.items() if waiting}
        wanted = (planned.keys() | undescribed.keys() | letting_go | deleting) & places.keys()
        self._nothing_at = None if wanted else state
        for run in sorted(wanted):
            if self._in_turn(run):
                work = partial(self._collect_run, places[run], planned[run], undescribed[run])
                if not self._start(f"collect: run {run}", work):
                    self._again.add(run)

    def _in_turn(self, run: str) -> bool:
        """Whether its work may begin: behind what is collected or swept now it is next, behind what hangs it is not."""
        return self._deletions.free(run) or self._alone[run].locked()

    async def _collect_run(
        self, place: RunPlace, planned: Collection[Deletion], undescribed: Collection[Undescribed]
    ) -> None:
        try:
            async with self._alone[place.run]:
                await self._let_go(place)
                for snapshot in undescribed:
                    await self._describe(snapshot)
                refused = {deletion.id for deletion in planned if await self._delete(place, deletion)}
                if place.deleting and not self._letting_go.get(place.run) and not self._closing:
                    await self._delete_run(place, refused)
        finally:
            if place.run in self._again:
                self._again.discard(place.run)
                self._collect = True

    async def _let_go(self, place: RunPlace) -> None:
        """Remove the hard links to what has settled; those of which an engine may still read later."""
        waiting = self._letting_go[place.run]  # one leaves it when it is gone: what fails is tried again
        loading = self._loading() if waiting else ()
        for held in [held for held in waiting if held.path not in loading]:
            remove = partial(remove_held, place.root, place.run, Path(held.path).name)
            try:
                await self._deletions.run(place.run, remove, timeout_s=DELETE_S)
            except Refused as exc:
                log.warning("gc: %s of %s is left: %s", held.path, place.run, exc)
            except TimeoutError:
                raise
            except OSError as exc:  # what else there is to delete does not wait for it
                log.warning("gc: %s of %s: %s; it is tried again", held.path, place.run, exc)
                continue
            waiting.remove(held)
        if waiting:
            self._collect_again()

    async def _describe(self, snapshot: Undescribed) -> None:
        """Read the nonce of an export whose points ended before the checks, so that it can be told to be ours."""
        try:
            look = partial(manifest_of, snapshot.path, self._places)
            manifest = await self._deletions.run(snapshot.run, look, timeout_s=SCAN_S)
        except (SnapshotFault, ConfigError):  # not there, or damaged: it is left alone
            return
        except StoreUnavailable as exc:  # the run's other snapshots do not wait for it
            log.warning("gc: step %d of %s: %s; it is tried again", snapshot.step, snapshot.run, exc)
            self._collect_again()
            return
        if await self._ledger(self._retention.describe, snapshot, manifest):
            self._collect = True

    async def _delete(self, place: RunPlace, deletion: Deletion) -> bool:
        """Delete one snapshot; returns whether it is left for good."""
        if self._closing:
            return False
        if not await self._ledger(self._retention.claim, deletion.id) or deletion.path in self._loading():
            self._collect_again()  # somebody came to need it, or may: look again
            return False
        confirm = partial(self._retention.deleted, deletion.id)
        try:
            work = partial(collect, deletion, place.root, confirm)
            if is_url(deletion.path):
                spare = partial(self._retention.spare, deletion.id)
                work = partial(collect_objects, deletion, self._places.cache.store, spare, confirm)
            await self._deletions.run(place.run, work, timeout_s=DELETE_S)
        except (Refused, ConfigError) as exc:  # the latter: there are no object stores any more, or no key of one
            log.warning("gc: step %d of %s is left: %s", deletion.step, deletion.run, exc)
            return True
        except TimeoutError:
            raise
        except (OSError, StoreUnavailable) as exc:
            log.warning("gc: step %d of %s: %s; it is tried again", deletion.step, deletion.run, exc)
            self._collect_again()
        return False

    async def _delete_run(self, place: RunPlace, refused: Collection[str]) -> None:
        objects = (place.run,) if place.collect_objects else ()
        left = plan_deletions(await self._ledger(self._retention.on_storage), {place.run: 0}, objects)
        if any(deletion.id not in refused for deletion in left):
            return
        await self._sweep_alone(place)
        remove = partial(remove_results, place.root, place.run)
        await self._deletions.run(place.run, remove, timeout_s=DELETE_S)
        if not await self._ledger(self._retention.forget, place.run):
            self._collect = True

    async def _checkpoint(self) -> None:
        """In a thread of its own: the disk may take long, and nobody else need wait for it."""
        await self._checkpoint_threads.run(self._retention.tend)

    # --- what is left over

    async def _sweep(self) -> None:
        await self._ledger(self._retention.forget_events)
        await self._cache_threads.run(partial(sweep, self._places))
        for place in await self._ledger(self._retention.places):
            if self._in_turn(place.run):
                self._start(f"leftovers: run {place.run}", partial(self._sweep_run, place))

    async def _sweep_run(self, place: RunPlace) -> None:
        async with self._alone[place.run]:
            await self._sweep_alone(place)

    async def _sweep_alone(self, place: RunPlace) -> None:
        look = partial(find_leftovers, place.root, place.run)
        found = await self._deletions.run(place.run, look, timeout_s=SCAN_S)
        if not found:
            return
        reserved = await self._ledger(self._retention.reserved_runs)
        held = {Path(held.path).name for held in await self._ledger(self._retention.held)}
        held |= {Path(path).name for path in self._loading()}  # also links that no point needs any more
        idle_s = 0.0 if place.deleting else self._service.leftover_idle_s  # nobody looks after it is forgotten
        stuck: list[Exception] = []  # one that can't be removed keeps no other
        for leftover in plan_leftovers(found, reserved, held, now=time.time(), idle_s=idle_s):
            work = partial(remove_leftover, leftover, place.root)
            if leftover.kind is LeftoverKind.TRASH:
                work = partial(tend_trash, leftover, place.root, await self._ledger(self._retention.needed, place.run))
            try:
                await self._deletions.run(place.run, work, timeout_s=DELETE_S)
            except TimeoutError:
                raise
            except (OSError, Refused) as exc:
                stuck.append(exc)
        if stuck:
            raise stuck[0]
