"""GC's round over ledger and disk: what goes, what stays, and a run that is deleted whole."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from eval_service.contract.errors import NotFound, StoreUnavailable
from eval_service.contract.names import (
    DISPATCH,
    MANIFEST,
    TRASH_PREFIX,
    beside,
    held_name,
    partial_name,
    samples_file,
    trash_name,
)
from eval_service.contract.outbox import Outbox
from eval_service.contract.snapshot import Published
from eval_service.contract.states import PointState, Reason
from eval_service.controller.db import LedgerThread
from eval_service.controller.housekeeping import Housekeeping
from eval_service.fleet_config import ServiceConfig
from eval_service.gc.collect import Collected, collect, find_leftovers, remove_held, remove_leftover
from eval_service.gc.plan import Deletion, Leftover
from eval_service.intake import Known, Scan, scan_run
from eval_service.ledger.bounds import Bounds
from eval_service.ledger.intents import Intents
from eval_service.ledger.moves import Facts
from eval_service.ledger.schema import snapshots
from eval_service.objects.config import ObjectsConfig
from eval_service.objects.places import Places
from eval_service.objects.store import ObjectStore, Until
from eval_service.objects.upload import upload
from tests.support.ledger import SUITES, Ledger, result
from tests.support.tiny_snapshots import lay_out, publish, request, tiny
from tests.support.until import until

S = PointState


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger(tmp_path)
    ledger.put_run(max_in_flight=50, keep=0)
    return ledger


def tend(
    ledger: Ledger,
    until: Callable[[], object],
    *,
    settled: Callable[[], object] = lambda: True,
    loading: Callable[[], frozenset[str]] = frozenset,
    pinned: Callable[[], frozenset[str]] = frozenset,
    changes: Callable[[], int | None] = lambda: None,
    places: Places | None = None,
    scan_interval_s: float = 3600,  # one scan, the first: a later one would mend whatever was missed
) -> None:
    """Let the housekeeping run until something is so."""

    async def work() -> None:
        thread = LedgerThread()
        service = ServiceConfig(roots=(ledger.root,), state_dir=ledger.base, scan_interval_s=scan_interval_s)
        keeping = Housekeeping(
            service,
            ledger.intents,
            ledger.retention,
            thread,
            loading=loading,
            pinned=pinned,
            changes=changes,
            places=places,
        )
        async with asyncio.timeout(60):
            while not until():
                if settled():
                    keeping.something_settled()
                await keeping.tick()
                await asyncio.sleep(0.01)
        await keeping.close()
        await thread(lambda: None)  # what it was asked before ends while there is a loop to hear it
        thread.close()

    asyncio.run(work())


def export(ledger: Ledger, step: int, seed: int | None = None) -> Published:
    return publish(tiny(seed=step if seed is None else seed), ledger.root, step=step)


def send(ledger: Ledger, published: Published, *, again: bool = False) -> str:
    """As the trainer does: under the reservation that lies beside the snapshot."""
    manifest = published.manifest
    (request,) = json.loads((published.path / DISPATCH).read_bytes())
    reservation = str(uuid.uuid4()) if again else request["reservation"]
    path = str(published.path)
    sent = ledger.send(manifest.step, manifest.digest, manifest.run, snapshot=path, reservation=reservation)
    ledger.look()
    return sent.points[0].id


def done(ledger: Ledger, published: Published, score: float, **changes: str) -> str:
    point = send(ledger, published)
    ledger.moves.admit(ledger.snapshot(published.manifest.step)["id"], Facts(published.manifest, 32))
    ledger.go(point, S.SCORING)
    assert ledger.moves.finish(point, result(score=score, **changes))
    ledger.clock.turn(1)
    return point


def test_what_settled_goes_and_the_best_the_held_and_the_needed_stay(ledger: Ledger) -> None:
    best, held, plain, needed = (export(ledger, step) for step in (1, 2, 3, 4))
    done(ledger, best, 0.9)
    ledger.orders.hold(done(ledger, held, 0.1))
    done(ledger, plain, 0.2)
    send(ledger, needed)
    tend(ledger, lambda: ledger.snapshot(3)["deleted_at"] is not None)
    assert [p.path.exists() for p in (best, held, plain, needed)] == [True, True, False, True]


def test_a_stale_higher_step_left_in_a_root_is_a_point_of_its_own_and_harms_no_lower_one(ledger: Ledger) -> None:
    """A former launch died between the rename and its POST, ahead of where this one goes on."""
    stale, best, plain = (export(ledger, step) for step in (900, 1, 2))
    done(ledger, best, 0.9)
    tend(ledger, lambda: ledger.snapshot(900) is not None)
    ledger.look()
    done(ledger, plain, 0.1)
    tend(ledger, lambda: not plain.path.exists())
    assert {step: state for step, _, state in ledger.states()} == {1: S.DONE, 2: S.DONE, 900: S.QUEUED}
    assert best.path.exists()
    assert stale.path.exists()


def test_what_an_engine_loads_now_stays_until_it_is_done(ledger: Ledger) -> None:
    """With `keep` 0, say, and an engine in doubt that is given its last good snapshot once more."""
    probed = export(ledger, 1)
    done(ledger, probed, 0.1)
    done(ledger, export(ledger, 2), 0.9)
    asked: list[bool] = []

    def loading() -> frozenset[str]:
        asked.append(probed.path.is_dir())
        return frozenset({str(probed.path)} if len(asked) < 3 else ())

    tend(ledger, lambda: not probed.path.exists(), loading=loading)
    assert asked == [True, True, True]


def counted(asked: list[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, which is noted."""

    def noted(*args: Any) -> Any:
        asked.append(name)
        return call(*args)

    return noted


def test_what_could_not_be_done_is_tried_with_each_scan_though_the_ledger_is_as_it_was(ledger: Ledger) -> None:
    """Such as an export that a shared file system shows late."""
    early = export(ledger, 1)
    ledger.orders.cancel(send(ledger, early))
    ledger.look()
    hidden = early.path.rename(ledger.base / "hidden")
    looks: list[int] = []

    def gone() -> bool:
        looks.append(1)
        if len(looks) == 20:
            hidden.rename(early.path)
        return len(looks) > 20 and not early.path.exists()

    tend(ledger, gone, settled=lambda: False, changes=ledger.moves.changes, scan_interval_s=0.01)


@pytest.mark.parametrize("change", ["released", "unpinned"])
def test_where_nothing_changed_nothing_is_planned_with_a_scan_and_any_change_is_seen(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Such as a hold that is released, which no point's end tells of."""
    plain = export(ledger, 1)
    point = done(ledger, plain, 0.1)
    done(ledger, export(ledger, 2), 0.9)
    if change == "released":
        ledger.orders.hold(point)
    asked: list[str] = []
    for name in ("on_storage", "places"):  # with each plan; with each plan and each scan
        monkeypatch.setattr(ledger.retention, name, counted(asked, name, getattr(ledger.retention, name)))
    changed: list[int] = []

    def gone() -> bool:
        if asked.count("places") >= 8 and not changed:
            changed.append(asked.count("on_storage"))
            if change == "released":
                ledger.orders.release(point)
        return not plain.path.exists()

    def pinned() -> frozenset[str]:
        return frozenset({str(plain.path)} if change == "unpinned" and not changed else ())

    tend(
        ledger,
        gone,
        settled=lambda: False,
        pinned=pinned,
        changes=ledger.moves.changes,
        scan_interval_s=0.01,
    )
    assert changed == [1]


def test_a_refused_export_goes_with_its_nonce(ledger: Ledger) -> None:
    bad = export(ledger, 1)
    send(ledger, bad)
    (waiting,) = ledger.moves.unadmitted()
    ledger.moves.refuse(waiting.id, Reason.SNAPSHOT_INVALID, "NaN", bad.manifest)
    tend(ledger, lambda: not bad.path.exists())


def test_an_export_whose_point_was_cancelled_before_the_checks_goes_too(ledger: Ledger) -> None:
    early = export(ledger, 1)
    ledger.orders.cancel(send(ledger, early))
    ledger.look()
    tend(ledger, lambda: not early.path.exists())


def test_a_deletion_that_a_dispatch_overtook_leaves_the_new_snapshot_to_its_checks(ledger: Ledger) -> None:
    published = export(ledger, 1)
    done(ledger, published, 0.1)
    done(ledger, export(ledger, 2), 0.9)
    assert ledger.retention.claim(ledger.snapshot(1)["id"])
    send(ledger, published, again=True)
    other = export(ledger, 3)
    done(ledger, other, 0.1)
    tend(ledger, lambda: not other.path.exists())
    assert published.path.exists()
    assert [item.step for item in ledger.moves.unadmitted()] == [1]


def test_a_deleted_run_goes_with_its_results_and_leaves_what_is_a_callers(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    ledger.put_run("r2")
    samples = samples_file(ledger.root, "r1", 1, "main", "p")
    samples.parent.mkdir(parents=True)
    samples.write_bytes(b"samples")
    ours = export(ledger, 1)
    done(ledger, ours, 0.9, samples_path=str(samples))
    theirs = lay_out(tiny(), ledger.root / "base-model")
    ledger.send(0, snapshot=str(theirs), source="caller")
    other = publish(tiny(), ledger.root, run="r2", step=1)
    (ledger.root / "r1" / partial_name("abcd1234")).mkdir()  # its trainer was killed just now
    samples.with_name(beside(samples.name)).write_bytes(b"half")
    ledger.look()
    ledger.orders.delete_run("r1")
    ledger.look()

    def forgotten() -> bool:
        try:
            ledger.views.run("r1")
        except NotFound:
            return True
        return False

    with caplog.at_level(logging.WARNING):
        tend(ledger, forgotten)
    assert not ours.path.exists()
    assert not samples.exists()
    assert theirs.is_dir()
    assert other.path.is_dir()
    assert ledger.views.run("r2").state == "active"
    assert list((ledger.root / "r1").iterdir()) == []


def done_in_store(ledger: Ledger, published: Published, url: str) -> None:
    """A point of a run whose objects may be collected."""
    ledger.put_run(max_in_flight=50, keep=0, collect_objects=True)
    ledger.intents = Intents(ledger.db, Bounds((ledger.root,), SUITES, objects=(url.partition("/r1/")[0],)))
    point = ledger.send(published.manifest.step, published.manifest.digest, snapshot=url).points[0].id
    ledger.look()
    ledger.moves.admit(ledger.snapshot(published.manifest.step)["id"], Facts(published.manifest, 32))
    ledger.go(point, S.SCORING)
    assert ledger.moves.finish(point, result(score=0.1))


def test_what_a_store_kept_back_of_a_deletion_goes_when_it_answers_again(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = publish(tiny(), ledger.base / "elsewhere", step=1)
    prefix = (ledger.base / "store").as_uri()
    there = upload(published.path, prefix)
    done_in_store(ledger, published, there.url)
    done(ledger, export(ledger, 2), 0.9)
    refused: list[object] = []
    delete = ObjectStore.delete

    def away_once(store: ObjectStore, url: str, until: Until) -> None:
        if not refused and url.endswith(MANIFEST):
            refused.append(ledger.snapshot(1)["deleted_at"])
            raise StoreUnavailable(f"{url} can't be had")
        delete(store, url, until)

    monkeypatch.setattr(ObjectStore, "delete", away_once)
    places = Places(ObjectsConfig(prefixes=(prefix,)), ledger.base)
    tend(ledger, lambda: ledger.snapshot(1)["deleted_at"] is not None, places=places)
    assert refused == [None], "not told before it was so"
    assert [path for path in (ledger.base / "store").rglob("*") if path.is_file()] == []


def test_a_deleted_run_goes_where_its_object_store_was_taken_out_of_the_config(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    published = export(ledger, 1)
    done_in_store(ledger, published, f"s3://bucket/evals/r1/{published.path.name}")
    ledger.orders.delete_run("r1")
    ledger.look()
    with caplog.at_level(logging.WARNING):
        tend(ledger, lambda: not ledger.retention.places())
    assert "[objects]" in caplog.text


def test_a_deleted_run_is_not_forgotten_while_a_snapshot_could_not_be_deleted(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = export(ledger, 1)
    done(ledger, ours, 0.9)
    ledger.orders.delete_run("r1")
    ledger.look()
    tries = 0

    def fail(*_: object) -> None:
        nonlocal tries
        tries += 1
        raise OSError("the file system is away")

    with monkeypatch.context() as patched:
        patched.setattr("eval_service.controller.housekeeping.collect", fail)
        tend(ledger, lambda: tries >= 3)
        assert ledger.views.run("r1").state == "deleting"
    tend(ledger, lambda: not ours.path.exists())


def test_one_runs_unusable_directory_keeps_no_other_run_from_the_scan_or_the_sweep(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    ledger.put_run("a-too-deep", root=str(ledger.root.joinpath(*["d" * 200] * 25)))
    ledger.put_run("b-link")
    (ledger.root / "b-link").symlink_to(ledger.base)
    ledger.put_run("z-after")
    unsent = publish(tiny(), ledger.root, run="z-after", step=7)
    trash = ledger.root / "z-after" / trash_name("0" * 32)
    trash.mkdir()
    with caplog.at_level(logging.WARNING):
        # Each run is looked at beside the others, so that the one that can't be is told of at any time.
        tend(
            ledger,
            lambda: (
                ledger.views.points(run="z-after").points and not trash.exists() and "run a-too-deep" in caplog.text
            ),
        )
    assert [point.step for point in ledger.views.points(run="z-after").points] == [7]
    assert unsent.path.is_dir()


def test_an_outbox_request_whose_path_is_a_loop_of_links_hinders_no_other(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    loop = ledger.root / "loop"
    loop.symlink_to(loop)
    bad = request("r1", 1, snapshot=str(loop / "base"), source="caller", digest=None)
    Outbox.of(ledger.root, "r1").put(bad)
    export(ledger, 7)
    with caplog.at_level(logging.WARNING):
        tend(ledger, lambda: len(ledger.states()) == 2)
    # It is taken in as it is written; the checks, which follow its links, refuse it.
    assert [point.step for point in ledger.views.points(run="r1").points] == [1, 7]
    assert not caplog.text


def test_a_deletion_that_the_file_system_refuses_keeps_no_other_from_being_done(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = export(ledger, 1), export(ledger, 2)
    for published in (first, second):
        done(ledger, published, 0.1)
    done(ledger, export(ledger, 3), 0.9)

    def but_for_the_first(deletion: Deletion, root: Path, confirm: Callable[[], bool]) -> Collected:
        if deletion.step == 1:
            raise OSError("it is away")
        return collect(deletion, root, confirm)

    monkeypatch.setattr("eval_service.controller.housekeeping.collect", but_for_the_first)
    with caplog.at_level(logging.WARNING):
        tend(ledger, lambda: not second.path.exists())
    assert first.path.is_dir()
    assert "step 1 of r1" in caplog.text


@pytest.mark.parametrize("configured", [True, False])
def test_an_object_store_that_is_away_or_no_longer_configured_keeps_no_directory_from_being_deleted(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, configured: bool
) -> None:
    ledger.put_run(max_in_flight=50, keep=0, collect_objects=True)
    first, second, best = (export(ledger, step) for step in (1, 2, 3))
    for published, score in ((first, 0.1), (second, 0.2), (best, 0.9)):
        done(ledger, published, score)
    moved = update(snapshots).where(snapshots.c.step == 1).values(path=f"s3://bucket/r1/{first.path.name}")
    with ledger.db.writing() as connection:
        connection.execute(moved)

    def away(*_: object) -> Collected:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr("eval_service.controller.housekeeping.collect_objects", away)
    config = ObjectsConfig(prefixes=("s3://bucket",)) if configured else None
    tend(ledger, lambda: ledger.snapshot(2)["deleted_at"] is not None, places=Places(config, ledger.base))
    assert ledger.snapshot(1)["deleted_at"] is None


def test_a_file_system_that_hangs_under_one_run_keeps_no_other_run_from_the_scan(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in ("a-hung", "z-after"):
        ledger.put_run(run)
    publish(tiny(), ledger.root, run="z-after", step=7)
    release = threading.Event()

    def scan(root: Path, run: str, known: Known) -> Scan:
        if run == "a-hung":
            release.wait(100)
        return scan_run(root, run, known)

    monkeypatch.setattr("eval_service.controller.housekeeping.scan_run", scan)
    try:
        tend(ledger, lambda: ledger.views.points(run="z-after").points)
    finally:
        release.set()
    assert [point.step for point in ledger.views.points(run="z-after").points] == [7]


def test_a_deletion_that_hangs_under_one_run_keeps_no_other_run_from_theirs(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.put_run("z-after", keep=0)
    hung = export(ledger, 1)
    done(ledger, hung, 0.1)
    done(ledger, export(ledger, 2), 0.9)
    other = publish(tiny(), ledger.root, run="z-after", step=1)
    ledger.orders.cancel(send(ledger, other))
    ledger.look()
    release = threading.Event()

    def hangs(deletion: Deletion, root: Path, confirm: Callable[[], bool]) -> Collected:
        if deletion.run == "r1":
            release.wait(100)
        return collect(deletion, root, confirm)

    monkeypatch.setattr("eval_service.controller.housekeeping.collect", hangs)
    try:
        tend(ledger, lambda: not other.path.exists())
        assert hung.path.exists()
    finally:
        release.set()


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "hangs"])
def test_a_deletion_under_way_is_over_when_the_controller_is_and_no_other_begins_but_one_that_hangs_keeps_nobody(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    published = [export(ledger, step) for step in (1, 2, 3)]
    for step, one in enumerate(published):
        done(ledger, one, 0.1 * step)
    begun, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def slow(deletion: Deletion, root: Path, confirm: Callable[[], bool]) -> Collected:
        begun.set()
        assert go_on.wait(100)
        try:
            return collect(deletion, root, confirm)
        finally:
            over.set()

    monkeypatch.setattr("eval_service.controller.housekeeping.collect", slow)
    monkeypatch.setattr("eval_service.controller.housekeeping.CLOSE_S", 100.0 if ends else 0.0)

    async def work() -> None:
        thread = LedgerThread()
        service = ServiceConfig(roots=(ledger.root,), state_dir=ledger.base)
        keeping = Housekeeping(service, ledger.intents, ledger.retention, thread)
        while not begun.is_set():
            await keeping.tick()
            await asyncio.sleep(0.01)
        closing = asyncio.create_task(keeping.close())
        if ends:
            ended, _ = await asyncio.wait({closing}, timeout=0.5)
            assert not ended
            go_on.set()
        await closing
        assert [one.path.exists() for one in published] == [not ends, True, True]
        assert not list((ledger.root / "r1").glob(f"{TRASH_PREFIX}*"))
        thread.close()

    try:
        asyncio.run(asyncio.wait_for(work(), 60))
    finally:
        go_on.set()
        assert over.wait(100)


def test_a_pipe_in_the_manifests_place_holds_up_no_collection(ledger: Ledger) -> None:
    odd, other = export(ledger, 1), export(ledger, 2)
    for published in (odd, other):
        ledger.orders.cancel(send(ledger, published))
        ledger.look()
    (odd.path / MANIFEST).unlink()
    os.mkfifo(odd.path / MANIFEST)
    tend(ledger, lambda: not other.path.exists())
    assert odd.path.is_dir(), "nobody can tell that it is ours"


def test_what_an_idle_engine_holds_stays_for_its_run_and_goes_with_it(ledger: Ledger) -> None:
    held, other = export(ledger, 1), export(ledger, 2)
    done(ledger, held, 0.1)
    done(ledger, other, 0.2)
    done(ledger, export(ledger, 3), 0.9)
    pinned = frozenset({str(held.path)})
    tend(ledger, lambda: not other.path.exists(), pinned=lambda: pinned)
    assert held.path.exists()
    ledger.orders.delete_run("r1")
    ledger.look()
    tend(ledger, lambda: not held.path.exists(), pinned=lambda: pinned)


def test_a_snapshot_that_is_exported_again_while_it_is_being_deleted_is_there_for_the_new_point(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed trainer finds the directory, uses it, and dispatches it, between the claim and the deletion."""
    published = export(ledger, 1)
    done(ledger, published, 0.1)
    done(ledger, export(ledger, 2), 0.9)
    new: list[str] = []
    over: list[Collected] = []

    def overtaken(deletion: Deletion, root: Path, confirm: Callable[[], bool]) -> Collected:
        if not new:
            new.append(send(ledger, published, again=True))
        over.append(collect(deletion, root, confirm))
        return over[-1]

    monkeypatch.setattr("eval_service.controller.housekeeping.collect", overtaken)
    tend(ledger, lambda: over)
    assert published.path.is_dir()
    assert ledger.state(new[0]) is S.QUEUED


def test_a_snapshot_is_not_deleted_while_its_step_is_exported_again(ledger: Ledger) -> None:
    again, other = export(ledger, 1), export(ledger, 2)
    done(ledger, again, 0.1)
    assert ledger.retention.claim(ledger.snapshot(1)["id"]), "claimed just before"
    ledger.reserve(1)
    done(ledger, other, 0.2)
    done(ledger, export(ledger, 3), 0.9)
    tend(ledger, lambda: not other.path.exists())
    assert again.path.is_dir()


def test_a_deletion_cut_short_is_undone_for_what_was_dispatched_again_meanwhile(ledger: Ledger) -> None:
    published = export(ledger, 1)
    done(ledger, published, 0.1)
    assert ledger.retention.claim(ledger.snapshot(1)["id"])
    assert published.manifest.nonce is not None
    trash = published.path.with_name(trash_name(published.manifest.nonce))
    published.path.rename(trash)
    ledger.send(1, published.manifest.digest, snapshot=str(published.path))
    tend(ledger, published.path.is_dir)


@pytest.mark.parametrize("busy", ["collecting", "sweeping"])
def test_what_settles_while_its_run_is_collected_or_swept_goes_right_after_and_not_with_the_next_scan(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, busy: str
) -> None:
    first, second = (hold(ledger, step) for step in (1, 2))
    ledger.orders.cancel(first[0])
    ledger.look()
    begun, go_on = threading.Event(), threading.Event()
    work: dict[str, Callable[..., object]] = {"collecting": remove_held, "sweeping": find_leftovers}
    real = work[busy]

    def slow(*args: Any) -> object:
        begun.set()
        assert go_on.wait(100)
        return real(*args) if busy == "collecting" else []  # the sweep found nothing before, and is over

    monkeypatch.setattr(f"eval_service.controller.housekeeping.{real.__name__}", slow)
    looks = iter(range(1_000_000))

    def settled() -> bool:
        """Once while the run is busy; then its work goes on, and nothing else is said."""
        if not begun.is_set() or go_on.is_set():
            return False
        look = next(looks)
        if look == 0:
            ledger.orders.cancel(second[0])
            ledger.look()
        if look == 20:
            go_on.set()
        return look == 0

    tend(ledger, lambda: not first[1].exists() and not second[1].exists(), settled=settled)


def test_a_run_that_is_being_collected_as_the_sweep_comes_is_swept_right_after_and_not_with_the_next_one(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    point, held = hold(ledger, 1)
    ledger.orders.cancel(point)
    ledger.look()
    trash = ledger.root / "r1" / trash_name("0" * 32)
    trash.mkdir()
    removing, looked = threading.Event(), threading.Event()
    sweep = Housekeeping._sweep

    def remove(root: Path, run: str, name: str) -> None:
        removing.set()
        assert looked.wait(100)
        remove_held(root, run, name)

    async def swept(keeping: Housekeeping) -> None:
        await sweep(keeping)
        looked.set()

    monkeypatch.setattr("eval_service.controller.housekeeping.remove_held", remove)
    monkeypatch.setattr("eval_service.controller.housekeeping.sweep", lambda _: removing.wait(100))
    monkeypatch.setattr(Housekeeping, "_sweep", swept)
    tend(ledger, lambda: not held.exists() and not trash.exists(), settled=lambda: False)


def test_hard_links_that_the_file_system_would_not_remove_are_tried_again(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    point, held = hold(ledger, 1)
    ledger.orders.cancel(point)
    ledger.look()
    failures = iter([OSError(errno.EIO, "Input/output error")])

    def remove(root: Path, run: str, name: str) -> None:
        for failure in failures:
            raise failure
        remove_held(root, run, name)

    monkeypatch.setattr("eval_service.controller.housekeeping.remove_held", remove)
    monkeypatch.setattr("eval_service.controller.housekeeping.find_leftovers", lambda *_: [])
    tend(ledger, lambda: not held.exists(), settled=lambda: False)


def test_what_can_never_be_removed_keeps_nothing_else_of_its_run(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    point, held = hold(ledger, 1)
    ledger.orders.cancel(point)
    early = export(ledger, 2)
    ledger.orders.cancel(send(ledger, early))
    ledger.look()
    half = [ledger.root / "r1" / partial_name(f"{number:032x}") for number in (1, 2)]
    for directory in half:
        directory.mkdir()
        os.utime(directory, (0, 0))

    def refused(*_: object) -> Collected:
        raise OSError(errno.EACCES, "Permission denied")

    def remove(leftover: Leftover, root: Path) -> Collected:
        return remove_leftover(leftover, root) if leftover.name == half[1].name else refused()

    monkeypatch.setattr("eval_service.controller.housekeeping.remove_held", refused)
    monkeypatch.setattr("eval_service.controller.housekeeping.remove_leftover", remove)
    tend(ledger, lambda: not early.path.exists() and not half[1].exists(), settled=lambda: False)
    assert held.exists()
    assert half[0].exists()


def test_links_that_an_engine_still_loads_from_are_swept_only_when_it_is_done(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    point, held = hold(ledger, 1)
    ledger.orders.cancel(point)
    ledger.look()
    looks: list[bool] = []

    def look(root: Path, run: str) -> list[Leftover]:
        looks.append(held.exists())
        return find_leftovers(root, run)

    monkeypatch.setattr("eval_service.controller.housekeeping.find_leftovers", look)
    monkeypatch.setattr("eval_service.controller.housekeeping.LEFTOVERS_EVERY_S", 0.0)
    tend(
        ledger,
        lambda: not held.exists(),
        settled=lambda: False,
        loading=lambda: frozenset({str(held)} if len(looks) < 3 else ()),
    )
    assert looks[:3] == [True, True, True]


def test_work_that_is_over_and_not_yet_taken_out_keeps_none_of_its_name_from_starting(ledger: Ledger) -> None:
    async def work() -> None:
        thread = LedgerThread()
        keeping = Housekeeping(
            ServiceConfig(roots=(ledger.root,), state_dir=ledger.base), ledger.intents, ledger.retention, thread
        )
        done: list[int] = []

        async def first() -> None:
            done.append(1)

        async def second() -> None:
            await asyncio.sleep(0)
            done.append(2)

        assert keeping._start("collect: run r1", first)
        assert not keeping._start("collect: run r1", second)
        await asyncio.sleep(0)
        assert done == [1]
        assert keeping._start("collect: run r1", second), "the first looks at nothing any more"
        await asyncio.sleep(0)
        assert not keeping._start("collect: run r1", first), "the second has just begun"
        await until(lambda: not keeping._tasks)
        assert done == [1, 2]
        thread.close()

    asyncio.run(asyncio.wait_for(work(), 30))


def hold(ledger: Ledger, step: int) -> tuple[str, Path]:
    """A point on somebody else's checkpoint, and the directory of the hard links to it."""
    theirs = lay_out(tiny(seed=step), ledger.root / f"model-{step}")
    point = ledger.send(step, digest=f"{step:032x}", snapshot=str(theirs), source="caller").points[0].id
    ledger.look()
    held = ledger.root / "r1" / held_name(uuid.uuid4().hex)
    ledger.moves.note_links(ledger.snapshot(step)["id"], str(held))
    held.mkdir(parents=True)
    os.link(theirs / "model.safetensors", held / "model.safetensors")
    return point, held


def test_a_deletion_that_takes_long_holds_up_nothing_else(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run's point is taken in while the files of a large checkpoint go."""
    big = export(ledger, 1)
    done(ledger, big, 0.1)
    done(ledger, export(ledger, 2), 0.9)
    ledger.put_run("z-after")
    remove, taken_in, waited = shutil.rmtree, threading.Event(), list[bool]()

    def hold(name: str, *, dir_fd: int) -> None:
        publish(tiny(), ledger.root, run="z-after", step=7)
        waited.append(taken_in.wait(20))
        remove(name, dir_fd=dir_fd)

    monkeypatch.setattr(shutil, "rmtree", hold)

    def gone() -> bool:
        if ledger.views.points(run="z-after").points:
            taken_in.set()
        return not big.path.exists() and not any((ledger.root / "r1").glob(".trash-*"))

    tend(ledger, gone, scan_interval_s=0.05)
    assert waited == [True], "the scan waited for the deletion"


def test_hard_links_go_when_their_snapshot_has_settled_and_what_nobody_knows_of_goes_too(ledger: Ledger) -> None:
    theirs = lay_out(tiny(), ledger.root / "base-model")
    point = ledger.send(0, digest="d" * 32, snapshot=str(theirs), source="caller").points[0].id
    ledger.look()
    held, stray = (ledger.root / "r1" / held_name(nonce * 16) for nonce in ("ab", "cd"))
    ledger.moves.note_links(ledger.snapshot(0)["id"], str(held))
    for directory in (held, stray):
        directory.mkdir(parents=True)
        os.link(theirs / "model.safetensors", directory / "model.safetensors")
    tend(ledger, lambda: not stray.exists())
    assert held.exists(), "a point waits for it"
    ledger.orders.cancel(point)
    ledger.look()
    tend(ledger, lambda: not held.exists())
    assert (theirs / "model.safetensors").is_file()
