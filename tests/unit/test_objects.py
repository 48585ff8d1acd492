"""Snapshots in object stores: names, secrets, the cache of a node, and deletion under guards."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from eval_service.cli.doctoring import _examined as examined
from eval_service.contract import names
from eval_service.contract.errors import (
    ConfigError,
    EvalfleetError,
    InvalidRequest,
    SnapshotAltered,
    SnapshotFault,
    SnapshotMissing,
    StoreUnavailable,
)
from eval_service.contract.manifest import read_manifest
from eval_service.contract.snapshot import Published
from eval_service.engine.nearby import near
from eval_service.engine.pin import PinFailed
from eval_service.engine.protocol import PinError, PinOrder
from eval_service.fleet_config import FleetConfig
from eval_service.gc.collect import Refused
from eval_service.gc.objects import collect_objects
from eval_service.gc.plan import Deletion, SnapshotRow, plan_deletions
from eval_service.ledger.bounds import Bounds
from eval_service.objects.cache import Lease, NodeCache
from eval_service.objects.config import ObjectsConfig
from eval_service.objects.deleting import DELETE_S, wait_unmarked
from eval_service.objects.places import Places
from eval_service.objects.store import ObjectStore, Until
from eval_service.objects.upload import upload
from eval_service.scratch import Kind, collect
from tests.support.tiny_snapshots import publish, tiny

WAIT_S = 20.0


@dataclass
class Shop(ObjectStore):
    """A store on the local disk, which counts what is read and may fail."""

    root: Path
    reads: Counter[str] = field(default_factory=Counter)
    before: Callable[[str], None] = lambda url: None

    def __post_init__(self) -> None:
        super().__init__(ObjectsConfig(prefixes=(self.prefix,), attempts=2), sleep=lambda seconds: None)

    @property
    def prefix(self) -> str:
        return f"file://{self.root}/bucket"

    def chunks(self, url: str, size_bytes: int, until: Until) -> Any:
        self.reads[url.rpartition("/")[2]] += 1
        self.before(url)
        return super().chunks(url, size_bytes, until)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return publish(tiny(), tmp_path / "runs", shards=2)


def cache_of(shop: Shop, bound_bytes: int = 10**9) -> NodeCache:
    return NodeCache(shop.root / "cache", bound_bytes, shop, parallel=2)


def soon(seconds: float = WAIT_S) -> Until:
    return Until.after(seconds)


def local(url: str) -> Path:
    return Path(url.removeprefix("file://"))


# --- names and secrets


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/evals/../other/step_1-00000000",
        "s3://bucket/other/step_1-00000000",
        "s3://bucket/evals",
        "s3://bucket/evalsx/step_1-00000000",
        "s3://key:secret@bucket/evals/a",
        "s3://bucket/evals/a?versionId=1",
        "s3://bucket/evals/*",
        "simplecache::s3://bucket/evals/a",
        "s3://bucket/evals//a",
        "s3://bucket/evals/a%2e%2e",
        "http://169.254.169.254/evals/a",
        "file:///etc/passwd",
    ],
)
def test_a_url_under_no_admitted_prefix_is_refused_with_the_field_and_the_fix(tmp_path: Path, url: str) -> None:
    bounds = Bounds((tmp_path,), (), objects=("s3://bucket/evals",))
    with pytest.raises(InvalidRequest) as caught:
        bounds.as_written(url, "snapshot")
    assert caught.value.field == "snapshot"
    assert caught.value.hint


def test_a_url_under_an_admitted_prefix_is_taken_as_it_is_written(tmp_path: Path) -> None:
    bounds = Bounds((tmp_path,), (), objects=("s3://bucket/evals",))
    url = "s3://bucket/evals/run-1/step_100-0123abcd"
    assert bounds.as_written(url + "/", "snapshot") == url
    with pytest.raises(InvalidRequest, match="absolute path"):
        bounds.as_written(url, "root")  # samples and outbox lie in a directory


@pytest.mark.parametrize("name", ["secret", "key", "aws_session_token", "password", "account_key", "connection_string"])
def test_a_secret_in_the_file_is_refused_and_the_way_by_variable_is_named(name: str) -> None:
    table = {"prefixes": ["s3://bucket/evals"], "options": {"s3": {"client_kwargs": {name: "hunter2"}}}}
    with pytest.raises(ValueError, match="options_env") as caught:
        FleetConfig.model_validate({"service": {"roots": ["/"]}, "groups": {}, "objects": table})
    assert name in str(caught.value)


def test_a_secret_by_variable_is_never_told(tmp_path: Path, shop: Shop) -> None:
    config = ObjectsConfig(prefixes=(shop.prefix,), attempts=1, options_env={"file": {"secret": "SHOP_SECRET"}})
    with pytest.raises(ConfigError, match="SHOP_SECRET"):
        ObjectStore(config, environ={}).check()
    store = ObjectStore(config, environ={"SHOP_SECRET": "hunter2"})
    store.check()

    def fails(files: Any, path: str) -> None:
        raise OSError("the server said: hunter2 is wrong")

    with pytest.raises(StoreUnavailable) as caught:
        store._ask(f"{shop.prefix}/x", fails, soon())
    assert "hunter2" not in str(caught.value)
    assert "***" in str(caught.value)


def test_a_driver_that_hangs_holds_nobody_beyond_the_deadline(shop: Shop) -> None:
    release = threading.Event()
    try:
        with pytest.raises(StoreUnavailable, match="no answer"):
            shop._ask(f"{shop.prefix}/x", lambda files, path: release.wait(WAIT_S), soon(0.05))
    finally:
        release.set()


def test_a_request_that_fails_is_tried_again(shop: Shop) -> None:
    tries = []

    def fails_once(files: Any, path: str) -> str:
        tries.append(path)
        if len(tries) == 1:
            raise OSError("503 Slow Down")
        return "done"

    assert shop._ask(f"{shop.prefix}/x", fails_once, soon()) == "done"


# --- fetching


def test_what_was_uploaded_is_fetched_whole_and_once(shop: Shop, published: Published) -> None:
    there = upload(published.path, shop.prefix, store=shop)
    assert there.url == f"{shop.prefix}/{published.manifest.run}/{published.path.name}"
    assert upload(published.path, shop.prefix, store=shop).reused
    shop.reads.clear()
    cache = cache_of(shop)
    lease = cache.hold(there.url, published.manifest.digest, soon())
    assert read_manifest(lease.path) == published.manifest
    assert (lease.path / names.COMPLETE).exists()
    assert set(shop.reads.values()) == {1}
    lease.release()
    before = Counter(shop.reads)
    cache.hold(there.url, published.manifest.digest, soon()).release()
    assert shop.reads == before


def test_the_marker_is_written_last_and_nothing_is_taken_without_it(
    shop: Shop, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    there_before: dict[str, set[str]] = {}

    def put(url: str, data: bytes, until: Until) -> None:
        there_before[local(url).name] = {path.name for path in local(url).parent.iterdir()}
        ObjectStore.put(shop, url, data, until)

    monkeypatch.setattr(shop, "put", put)
    there = upload(published.path, shop.prefix, store=shop)
    marker = local(there.url) / names.COMPLETE
    assert there_before[marker.name] == {path.name for path in marker.parent.iterdir()} - {marker.name}
    marker.unlink()
    with pytest.raises(SnapshotMissing):
        cache_of(shop).hold(there.url, published.manifest.digest, soon())


def truncated(place: Path, file: str) -> None:
    data = (place / file).read_bytes()
    (place / file).write_bytes(data[:-1])


def altered(place: Path, file: str) -> None:
    data = bytearray((place / file).read_bytes())
    data[-1] ^= 1
    (place / file).write_bytes(bytes(data))


def gone(place: Path, file: str) -> None:
    (place / file).unlink()


@pytest.mark.parametrize("damage", [truncated, altered, gone])
def test_an_object_that_is_not_what_the_manifest_says_is_a_fault_with_its_own_code(
    shop: Shop, published: Published, damage: Callable[[Path, str], None]
) -> None:
    there = upload(published.path, shop.prefix, store=shop)
    file = published.manifest.files[-1].name
    damage(local(there.url), file)
    cache = cache_of(shop)
    with pytest.raises(SnapshotAltered) as caught:
        cache.hold(there.url, published.manifest.digest, soon())
    assert (caught.value.code, caught.value.field) == ("snapshot_altered", file)
    assert cache.sweep() == 0
    assert [path.name for path in cache.directory.iterdir()] == ["room.lock"]


def test_another_digest_than_was_dispatched_is_refused(shop: Shop, published: Published) -> None:
    there = upload(published.path, shop.prefix, store=shop)
    with pytest.raises(SnapshotAltered) as caught:
        cache_of(shop).hold(there.url, "0" * 32, soon())
    assert caught.value.field == "digest"


def test_concurrent_fetches_of_one_snapshot_are_one_fetch(shop: Shop, published: Published) -> None:
    there = upload(published.path, shop.prefix, store=shop)
    shop.reads.clear()
    paths, start = [], threading.Barrier(6)

    def fetch() -> None:
        start.wait(WAIT_S)
        lease = cache_of(shop).hold(there.url, published.manifest.digest, soon())
        paths.append(lease.path)
        lease.release()

    threads = [threading.Thread(target=fetch) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(paths) == 6
    assert len(set(paths)) == 1
    assert set(shop.reads.values()) == {1}


def test_a_fetch_that_was_killed_is_swept_and_begun_anew(shop: Shop, published: Published) -> None:
    there = upload(published.path, shop.prefix, store=shop)
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from eval_service.objects.cache import NodeCache\n"
        "from eval_service.objects.config import ObjectsConfig\n"
        "from eval_service.objects.store import ObjectStore, Until\n"
        "class Slow(ObjectStore):\n"
        "    def chunks(self, url, size_bytes, until):\n"
        "        yield from super().chunks(url, size_bytes, until)\n"
        "        if url.endswith('safetensors'):\n"
        "            os.write(1, b'fetching\\n')\n"
        "            time.sleep(60)\n"
        f"store = Slow(ObjectsConfig(prefixes=({shop.prefix!r},)))\n"
        f"NodeCache(Path({str(shop.root / 'cache')!r}), 10**9, store).hold({there.url!r}, None, Until.after(60))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=dict(os.environ))
    assert child.stdout is not None
    assert child.stdout.readline() == b"fetching\n"
    cache = cache_of(shop)
    with pytest.raises(StoreUnavailable):  # it is fetched by another process
        cache.hold(there.url, published.manifest.digest, soon(0.2))
    child.kill()
    child.wait(WAIT_S)
    child.stdout.close()
    assert list(cache.directory.glob("*.part-*"))
    cache.sweep()
    assert not list(cache.directory.glob("*.part-*"))
    cache.hold(there.url, published.manifest.digest, soon()).release()
    key = next(cache.directory.glob("*-*.lock")).stem
    (cache.directory / key).rename(cache.directory / f"{key}.part-1")  # as another would have left it
    cache.hold(there.url, published.manifest.digest, soon()).release()
    assert not list(cache.directory.glob("*.part-*"))


def test_a_process_ends_though_a_fetch_of_its_own_hangs(shop: Shop, published: Published) -> None:
    there = upload(published.path, shop.prefix, store=shop)
    code = (
        "import threading\n"
        "from pathlib import Path\n"
        "from eval_service.objects.cache import NodeCache\n"
        "from eval_service.objects.config import ObjectsConfig\n"
        "from eval_service.objects.store import ObjectStore, Until\n"
        "fetching = threading.Event()\n"
        "class Hangs(ObjectStore):\n"
        "    def chunks(self, url, size_bytes, until):\n"
        "        if url.endswith('safetensors'):\n"
        "            fetching.set()\n"
        "            threading.Event().wait()\n"
        "        yield from super().chunks(url, size_bytes, until)\n"
        f"store = Hangs(ObjectsConfig(prefixes=({shop.prefix!r},)))\n"
        f"cache = NodeCache(Path({str(shop.root / 'cache')!r}), 10**9, store)\n"
        f"hold = lambda: cache.hold({there.url!r}, None, Until.after(60))\n"
        "threading.Thread(target=hold, daemon=True).start()\n"
        "assert fetching.wait(60)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# --- the bound


def three(shop: Shop, tmp_path: Path) -> tuple[list[tuple[str, str]], int]:
    """URL and digest of three snapshots of one size, and that size in the cache."""
    found = []
    for step in (1, 2, 3):
        there = upload(publish(tiny(seed=step), tmp_path / "runs", step=step).path, shop.prefix, store=shop)
        found.append((there.url, there.manifest.digest))
    cache = NodeCache(tmp_path / "measure", 10**9, shop)
    cache.hold(*found[0], soon()).release()
    return found, cache.sweep() + 64  # manifests differ by a few bytes


def test_the_cache_keeps_its_bound_and_lets_the_least_recently_used_go_first(shop: Shop, tmp_path: Path) -> None:
    (one, two, other), size = three(shop, tmp_path)
    cache = cache_of(shop, 2 * size)
    for number, snapshot in enumerate((one, two, one)):
        lease = cache.hold(*snapshot, soon())
        os.utime(lease._handle or 0, (number, number))
        lease.release()
    cache.hold(*other, soon()).release()
    assert (cache.has(*one), cache.has(*two), cache.has(*other)) == (True, False, True)
    assert cache.sweep() <= 2 * size
    assert NodeCache(cache.directory, size, shop).sweep() <= size


def test_what_is_in_use_is_never_removed_and_a_fetch_waits_for_it(shop: Shop, tmp_path: Path) -> None:
    (one, two, _), size = three(shop, tmp_path)
    cache = cache_of(shop, size)
    used = cache.hold(*one, soon())
    with pytest.raises(StoreUnavailable):
        cache.hold(*two, soon(0.2))
    assert cache.has(*one)
    timer = threading.Timer(0.1, used.release)
    timer.start()
    cache.hold(*two, soon()).release()
    timer.join(WAIT_S)
    assert (cache.has(*one), cache.has(*two)) == (False, True)


def test_a_disk_that_is_full_below_the_bound_lets_what_is_not_in_use_go(shop: Shop, tmp_path: Path) -> None:
    (one, two, _), _ = three(shop, tmp_path)
    cache = cache_of(shop)
    cache.hold(*one, soon()).release()

    def full(url: str) -> None:
        if url.endswith(".safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shop.before = full
    with pytest.raises(StoreUnavailable, match="disk is full"):
        cache.hold(*two, soon())
    assert not cache.has(*one)
    shop.before = lambda url: None
    cache.hold(*two, soon()).release()


def test_a_pin_loads_from_the_nodes_cache_and_tells_what_is_not_sound(shop: Shop, published: Published) -> None:
    there = upload(published.path, shop.prefix, store=shop)
    config = ObjectsConfig(prefixes=(shop.prefix,), attempts=1)
    order = PinOrder(there.url, published.manifest, "label")

    async def pin(places: Places) -> PinOrder:
        async with near(places, order) as here:
            return here

    places = Places(config, shop.root)
    here = asyncio.run(pin(places))
    assert Path(here.snapshot).parent == Path(here.roots[0]) == places.cache.directory
    altered(local(there.url), published.manifest.files[-1].name)
    for at, error in ((Places(), PinError.REFUSED), (Places(config, shop.root / "other"), PinError.NOT_VISIBLE)):
        with pytest.raises(PinFailed) as caught:
            asyncio.run(pin(at))
        assert caught.value.error is error
    assert "snapshot_altered" in caught.value.detail


def test_a_snapshot_that_comes_after_its_waiters_loop_has_ended_is_let_go_of(
    shop: Shop, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = upload(published.path, shop.prefix, store=shop)
    places = Places(ObjectsConfig(prefixes=(shop.prefix,), attempts=1), shop.root)
    begun, go_on, released = (threading.Event() for _ in range(3))
    hold, release = places.hold, Lease.release

    def held(url: str, digest: str | None) -> Lease:
        begun.set()
        assert go_on.wait(WAIT_S)
        return hold(url, digest)

    def let_go(lease: Lease) -> None:
        release(lease)
        released.set()

    async def give_up() -> None:
        async def wait() -> None:
            async with places.near(there.url, there.manifest.digest):
                pytest.fail("it was given up")

        waits = asyncio.create_task(wait())
        await asyncio.to_thread(begun.wait, WAIT_S)
        waits.cancel()

    monkeypatch.setattr(places, "hold", held)
    monkeypatch.setattr(Lease, "release", let_go)
    asyncio.run(give_up())
    go_on.set()
    assert released.wait(WAIT_S)


def test_a_lock_whose_snapshot_comes_as_leftovers_are_swept_is_kept_with_the_time_of_its_use(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(shop)
    key = f"{'a' * 32}-{'b' * 16}"
    cache.directory.mkdir()
    (cache.directory / f"{key}.lock").touch()
    alone = NodeCache._alone

    def fetched_before(which: NodeCache, name: str) -> Any:
        if name == key:
            (cache.directory / key).mkdir(exist_ok=True)
        return alone(which, name)

    monkeypatch.setattr(NodeCache, "_alone", fetched_before)
    cache.sweep()
    assert (cache.directory / f"{key}.lock").exists()


def test_a_snapshot_that_comes_at_the_moment_in_which_its_waiter_gives_up_is_let_go_of(
    shop: Shop, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would stay in the node's cache for as long as the process lives."""
    there = upload(published.path, shop.prefix, store=shop)
    places = Places(ObjectsConfig(prefixes=(shop.prefix,), attempts=1), shop.root)

    async def wait() -> None:
        async with places.near(there.url, there.manifest.digest):
            pytest.fail("it was given up")

    async def give_up() -> None:
        loop, waits = asyncio.get_running_loop(), asyncio.create_task(wait())
        made = loop.create_future()
        made.add_done_callback(lambda _: waits.cancel())  # before the task that waits for it runs again
        with monkeypatch.context() as patched:
            patched.setattr(loop, "create_future", lambda: made)
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await waits

    asyncio.run(give_up())
    assert places.cache.has(there.url, there.manifest.digest)
    assert NodeCache(places.cache.directory, 1, shop).sweep() == 0


def test_a_snapshot_larger_than_the_cache_is_refused_by_name(shop: Shop, tmp_path: Path) -> None:
    (one, *_), size = three(shop, tmp_path)
    with pytest.raises(SnapshotFault, match="cache holds") as caught:
        cache_of(shop, size // 2).hold(*one, soon())
    assert "cache_bytes" in (caught.value.hint or "")


def test_what_the_doctor_fetches_is_known_for_its_own_also_where_it_is_killed(
    shop: Shop, published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = upload(published.path, shop.prefix, store=shop)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with examined(there.url) as found:
        assert found.ok
        assert list(temporary.glob(f"{Kind.DOCTOR}*/.lock"))
        collect()
        assert found.directory.is_dir(), "it is in use"
    assert list(temporary.iterdir()) == []


# --- deletion


def deletion_of(there: Any, **changes: Any) -> Deletion:
    manifest = there.manifest
    known = {"run": manifest.run, "step": manifest.step, "digest": manifest.digest, "path": there.url}
    return Deletion(**{"id": "1", "nonce": manifest.nonce, **known, **changes})


def test_objects_are_deleted_only_where_the_run_says_so() -> None:
    from eval_service.contract.wire import Source

    def row(path: str) -> SnapshotRow:
        return SnapshotRow(path, "a", 1, "0" * 32, path, Source.STAGING, "0" * 32, settled_at=1.0)

    rows = (row("s3://b/p/a/step_1-00000000"), row("/r/a/step_1-00000000"))
    assert [deletion.path for deletion in plan_deletions(rows, {"a": 0})] == ["/r/a/step_1-00000000"]
    assert len(plan_deletions(rows, {"a": 0}, ("a",))) == 2


def test_a_confirmed_deletion_leaves_nothing_and_may_be_repeated(shop: Shop, published: Published) -> None:
    there = upload(published.path, shop.prefix, store=shop)
    left: list[int] = []

    def gone() -> None:
        left.append(len(list(local(there.url).iterdir())))

    freed = collect_objects(deletion_of(there), shop, lambda: True, gone)
    assert freed.freed_bytes == there.size_bytes
    assert collect_objects(deletion_of(there), shop, lambda: True, gone).freed_bytes == 0
    assert left == [0, 0]


def test_a_deletion_that_was_cut_short_is_not_told_as_done_and_is_finished_later(
    shop: Shop, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = upload(published.path, shop.prefix, store=shop)
    told: list[str] = []

    def away(url: str, until: Until) -> None:
        if not url.endswith(names.COMPLETE):
            raise StoreUnavailable(f"{url} can't be had")
        ObjectStore.delete(shop, url, until)

    with monkeypatch.context() as patched:
        patched.setattr(shop, "delete", away)
        with pytest.raises(StoreUnavailable):
            collect_objects(deletion_of(there), shop, lambda: True, lambda: told.append("too early"))
    assert not (local(there.url) / names.COMPLETE).exists()
    collect_objects(deletion_of(there), shop, lambda: True, lambda: told.append("gone"))
    assert (told, list(local(there.url).iterdir())) == (["gone"], [])


def test_what_was_dispatched_again_meanwhile_is_put_back(shop: Shop, published: Published) -> None:
    there = upload(published.path, shop.prefix, store=shop)
    seen = []

    def confirm() -> bool:
        seen.append((local(there.url) / names.COMPLETE).exists())
        return False

    collect_objects(deletion_of(there), shop, confirm, lambda: seen.append(True))
    assert seen == [False]  # nobody could take it in this moment
    cache_of(shop).hold(there.url, published.manifest.digest, soon()).release()


@pytest.mark.parametrize("begun", ["before its first object", "before its manifest", "before its marker"])
def test_what_is_uploaded_anew_while_the_old_export_is_deleted_is_whole(
    shop: Shop, published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: str
) -> None:
    """Users see `snapshot_altered` for an export that was whole when its trainer wrote it."""
    old = upload(published.path, shop.prefix, store=shop)
    anew = publish(tiny(), tmp_path / "again", shards=2)
    assert (anew.manifest.digest, anew.manifest.nonce != old.manifest.nonce) == (old.manifest.digest, True)
    deleting, on, ended, puts = threading.Event(), threading.Event(), threading.Event(), shop.put

    def confirm() -> bool:
        deleting.set()
        assert on.wait(WAIT_S)
        return True

    def delete() -> None:
        collect_objects(deletion_of(old), shop, confirm, lambda: None)
        ended.set()

    deleter = threading.Thread(target=delete)

    def put(url: str, data: bytes, until: Until) -> None:
        """The old one's deletion goes on, or ends, at some moment of the upload."""
        mine = threading.current_thread() is not deleter
        if mine and begun == "before its manifest" and url.endswith(names.MANIFEST):
            on.set()
            assert ended.wait(WAIT_S)
        puts(url, data, until)
        if mine and url.endswith(names.COMPLETE):
            on.set()

    monkeypatch.setattr(shop, "put", put)
    monkeypatch.setattr(shop, "sleep", lambda seconds: on.set())  # it waits for the mark to go
    if begun == "before its first object":
        deleter.start()
        assert deleting.wait(WAIT_S)
    else:  # it looks for the mark just before that is written
        (local(old.url) / names.COMPLETE).unlink()  # as an earlier deletion, which was cut short, has left it
        monkeypatch.setattr("eval_service.objects.upload.wait_unmarked", begin(deleter, deleting))
    there = upload(anew.path, shop.prefix, store=shop)
    deleter.join(WAIT_S)
    assert there.url == old.url
    assert not there.reused
    cache_of(shop).hold(there.url, there.manifest.digest, soon()).release()


def begin(deleter: threading.Thread, deleting: threading.Event) -> Callable[..., None]:
    """A look for the mark; the first one sees none, and then the deletion begins."""

    def look(*arguments: Any) -> None:
        if deleter.ident is not None:
            wait_unmarked(*arguments)
            return
        deleter.start()
        assert deleting.wait(WAIT_S)

    return look


def test_a_mark_of_a_deletion_that_was_killed_holds_nobody_up_for_ever(
    shop: Shop, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = upload(published.path, shop.prefix, store=shop)
    mark = local(there.url) / ".deleting"
    mark.write_text(str(time.time()))
    with monkeypatch.context() as patched:
        patched.setattr("eval_service.objects.deleting.LOOK_S", 2 * WAIT_S)  # the next look would be too late
        with pytest.raises(StoreUnavailable, match="being deleted"):
            upload(published.path, shop.prefix, store=shop, timeout_s=WAIT_S)
    for stale in (str(time.time() - DELETE_S - 1), "none of ours"):
        mark.write_text(stale)
        assert upload(published.path, shop.prefix, store=shop).reused


@pytest.mark.parametrize(
    ("changes", "field_"),
    [
        ({"nonce": "0" * 32}, "nonce"),
        ({"run": "another"}, "path"),
        ({"step": 7}, "path"),
        ({"digest": "f" * 32}, "path"),
        ({"path": "s3://elsewhere/a/step_1-00000000"}, "path"),
    ],
)
def test_a_deletion_whose_path_nonce_or_ledger_disagree_is_refused(
    shop: Shop, published: Published, changes: dict[str, Any], field_: str
) -> None:
    there = upload(published.path, shop.prefix, store=shop)
    before = sorted(path.name for path in local(there.url).iterdir())
    with pytest.raises(Refused) as caught:
        collect_objects(deletion_of(there, **changes), shop, lambda: True, lambda: None)
    assert caught.value.field == field_
    assert sorted(path.name for path in local(there.url).iterdir()) == before


def test_credentials_that_may_not_read_are_no_word_that_it_is_gone(
    shop: Shop, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = upload(published.path, shop.prefix, store=shop)

    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError("AccessDenied")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.info", denied)
    confirmed = []

    def confirm() -> bool:
        confirmed.append(True)
        return True

    with pytest.raises(Refused, match="AccessDenied"):
        collect_objects(deletion_of(there), shop, confirm, confirm)
    assert confirmed == []


@pytest.mark.parametrize("call", ["rm_file", "pipe_file"])
def test_credentials_that_may_read_and_not_change_leave_the_snapshot_to_others(
    shop: Shop, published: Published, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    there = upload(published.path, shop.prefix, store=shop)

    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError("AccessDenied")

    told: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(f"fsspec.implementations.local.LocalFileSystem.{call}", denied)
        with pytest.raises(Refused, match="AccessDenied"):
            collect_objects(deletion_of(there), shop, lambda: True, lambda: told.append("gone"))
    assert told == []
    assert upload(published.path, shop.prefix, store=shop, timeout_s=WAIT_S).reused
    cache_of(shop).hold(there.url, published.manifest.digest, soon()).release()


def test_a_bucket_that_is_gone_is_a_snapshot_that_is_gone(shop: Shop, published: Published) -> None:
    there = upload(published.path, shop.prefix, store=shop)
    shutil.rmtree(shop.root / "bucket")
    told: list[str] = []
    assert collect_objects(deletion_of(there), shop, lambda: True, lambda: told.append("gone")).freed_bytes == 0
    assert told == ["gone"]
    assert not (shop.root / "bucket").exists()


def test_a_directory_that_is_not_whole_is_not_uploaded(shop: Shop, published: Published) -> None:
    altered(published.path, published.manifest.files[0].name)
    with pytest.raises(SnapshotFault):
        upload(published.path, shop.prefix, store=shop)
    (published.path / names.COMPLETE).unlink()
    with pytest.raises(SnapshotMissing):
        upload(published.path, shop.prefix, store=shop)


def test_without_object_stores_a_url_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EvalfleetError) as caught:
        Places().hold("s3://bucket/a", None)
    assert caught.value.field == "objects"


def test_the_deadline_counts_down() -> None:
    assert 4000.0 < Until.after(5000.0).left_s <= 5000.0
    assert Until(time.monotonic() - 1).left_s == 0.0
