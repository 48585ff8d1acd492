"""A node's cache of snapshots from object stores: a directory on its local disk, shared by the processes of the node.

<dir>/<key>/                  a snapshot, whole and compared with its manifest
<dir>/<key>.lock              shared by who uses it, had alone by who fetches or removes it; its time is of the last use
<dir>/<key>.part-<bytes>/     one that is being fetched, with the room that it was promised
<dir>/<key>.trash-<nonce>/    one that is being removed

Locks are the kernel's, which die with their process: so concurrent fetches of one snapshot are one fetch, what is in
use is never removed, and what a killed process left is known for that. The sum of all bytes stays within the bound;
where what is in use leaves no room, a fetch waits for it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from eval_service.contract.errors import SnapshotAltered, SnapshotFault, StoreUnavailable
from eval_service.contract.manifest import Manifest
from eval_service.objects.fetch import fetch_into, read_remote_manifest, size_of
from eval_service.objects.store import ObjectStore, Until

_LOOK_S = 0.05
_KEY = r"[0-9a-f]{32}-[0-9a-f]{16}"
_ENTRY = re.compile(_KEY)
_PART = re.compile(rf"({_KEY})\.part-([0-9]+)")
_TRASH = re.compile(rf"{_KEY}\.trash-[0-9a-f]{{32}}")
_LOCK = ".lock"
_LOCKED = re.compile(rf"({_KEY})\.lock")


@dataclass(slots=True)
class Lease:
    """A cached snapshot that stays as long as this is not let go of."""

    path: Path
    _handle: int | None

    def release(self) -> None:
        """Let go; harmless when repeated."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


class NodeCache:
    """One node's; any number of processes may have one on the same directory.

    Args:
        bound_bytes: of all that the directory holds.
    """

    def __init__(
        self,
        directory: Path,
        bound_bytes: int,
        store: ObjectStore,
        *,
        parallel: int = 4,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.directory = directory
        self.store = store
        self._bound_bytes = bound_bytes
        self._parallel = parallel
        self._sleep = sleep

    def hold(self, url: str, digest: str | None, until: Until) -> Lease:
        """A snapshot on this node, fetched if it is not there yet. Blocks up to the deadline.

        Args:
            digest: of the manifest, where it is known; nothing is asked of the store for one that is cached.

        Raises:
            SnapshotMissing: it was not published (yet).
            SnapshotAltered: an object is not what the manifest says, or the manifest is of another digest.
            SnapshotFault: it can't be one, or is larger than the cache may be.
            StoreUnavailable: the store can't be reached, or there was no room, up to the deadline.
        """
        remote = None
        if digest is None:
            remote = read_remote_manifest(self.store, url, until)
            digest = remote[0].digest
        key = _key(url, digest)
        self.directory.mkdir(parents=True, exist_ok=True)
        while True:
            if (lease := self._lease(key)) is not None:
                return lease
            with self._alone(key) as alone:
                if alone and not (self.directory / key).is_dir():
                    remote = remote or self._checked(url, digest, until)
                    if self._fetch(key, url, *remote, until):
                        continue
            if until.left_s <= 0:
                raise StoreUnavailable(f"{url} did not come to this node in time", field="snapshot")
            self._sleep(_LOOK_S)

    def has(self, url: str, digest: str) -> bool:
        """Whether it is cached now."""
        return (self.directory / _key(url, digest)).is_dir()

    def sweep(self) -> int:
        """Remove what killed processes left, and what is beyond the bound; returns the bytes that are left."""
        if not self.directory.is_dir():
            return 0
        with self._alone("room") as alone:
            if alone:
                self._make_room(0)
        return self._used()

    # --- fetching

    def _checked(self, url: str, digest: str, until: Until) -> tuple[Manifest, bytes]:
        """The manifest, if it is the one that was asked for."""
        manifest, data = read_remote_manifest(self.store, url, until)
        if manifest.digest != digest:
            told = f"{url} is {manifest.digest}; {digest} was dispatched"
            raise SnapshotAltered(told, field="digest", hint="dispatch it anew")
        return manifest, data

    def _fetch(self, key: str, url: str, manifest: Manifest, data: bytes, until: Until) -> bool:
        """Fetch with the key's lock held; False where there is no room yet."""
        size = size_of(manifest) + len(data)
        if size > self._bound_bytes:
            told = f"it has {size} bytes, and a node's cache holds {self._bound_bytes}"
            raise SnapshotFault(told, field="snapshot", hint="raise objects.cache_bytes in fleet.toml")
        part = self._part(key, size)
        if part is None:
            return False
        try:
            fetch_into(part, self.store, url, manifest, data, until, parallel=self._parallel)
            part.rename(self.directory / key)
        except OSError as exc:
            why = str(exc)
            if exc.errno == errno.ENOSPC:
                self._make_way(size)
                why = "the disk is full"
            raise StoreUnavailable(f"{self.directory}: {why}", field="objects.cache_dir") from exc
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return True

    def _part(self, key: str, size: int) -> Path | None:
        """Where to fetch to, its room promised; None where there is none now."""
        for left in self.directory.glob(f"{key}.part-*"):  # of one who was killed: the key's lock is ours now
            shutil.rmtree(left, ignore_errors=True)
        with self._alone("room") as alone:
            if not alone or not self._make_room(size):
                return None
            part = self.directory / f"{key}.part-{size}"
            part.mkdir()
        return part

    # --- room

    def _make_room(self, size: int) -> bool:
        """Remove leftovers, then the least recently used, until so many bytes more are within the bound."""
        self._sweep_leftovers()
        used = self._used()
        for key in sorted(self._entries(), key=self._used_at):
            if used + size <= self._bound_bytes:
                break
            bytes_of_it = _bytes_in(self.directory / key)
            if self._evict(key):
                used -= bytes_of_it
        return used + size <= self._bound_bytes

    def _make_way(self, size: int) -> None:
        """The disk is full below the bound: let as much go as did not fit."""
        with self._alone("room") as alone:
            for key in sorted(self._entries(), key=self._used_at) if alone else ():
                bytes_of_it = _bytes_in(self.directory / key)
                size -= bytes_of_it if size > 0 and self._evict(key) else 0

    def _sweep_leftovers(self) -> None:
        for path in list(self.directory.iterdir()):
            if _TRASH.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
            elif (match := _PART.fullmatch(path.name)) is not None:
                with self._alone(match[1]) as alone:
                    if alone:  # nobody fetches it
                        shutil.rmtree(path, ignore_errors=True)
            elif (match := _LOCKED.fullmatch(path.name)) is not None and not (self.directory / match[1]).exists():
                with self._alone(match[1]) as alone:
                    if alone and not (self.directory / match[1]).exists():  # of one that could not be fetched
                        path.unlink(missing_ok=True)

    def _evict(self, key: str) -> bool:
        with self._alone(key) as alone:
            if not alone:
                return False
            trash = self.directory / f"{key}.trash-{uuid.uuid4().hex}"
            (self.directory / key).rename(trash)
            (self.directory / f"{key}{_LOCK}").unlink(missing_ok=True)
        shutil.rmtree(trash, ignore_errors=True)
        return True

    def _entries(self) -> list[str]:
        return [path.name for path in self.directory.iterdir() if _ENTRY.fullmatch(path.name)]

    def _used(self) -> int:
        """Bytes of what is there, and what was promised to what is coming."""
        parts = [match for path in self.directory.iterdir() if (match := _PART.fullmatch(path.name))]
        promised = sum(int(match[2]) for match in parts)
        return promised + sum(_bytes_in(self.directory / key) for key in self._entries())

    def _used_at(self, key: str) -> float:
        try:
            return (self.directory / f"{key}{_LOCK}").stat().st_mtime
        except FileNotFoundError:
            return 0.0

    # --- locks

    def _lease(self, key: str) -> Lease | None:
        """Share the lock of what is cached; None where it is not, or somebody has it alone."""
        handle = self._locked(key, fcntl.LOCK_SH)
        if handle is None:
            return None
        if not (self.directory / key).is_dir():
            os.close(handle)
            return None
        os.utime(handle)
        return Lease(self.directory / key, handle)

    @contextmanager
    def _alone(self, key: str) -> Iterator[bool]:
        """Have the lock alone, if nobody has it."""
        handle = self._locked(key, fcntl.LOCK_EX)
        try:
            yield handle is not None
        finally:
            if handle is not None:
                os.close(handle)

    def _locked(self, key: str, kind: int) -> int | None:
        path = self.directory / f"{key}{_LOCK}"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if (
                    os.fstat(handle).st_ino == path.stat().st_ino
                ):  # else it was removed meanwhile: another is the lock now
                    return handle
        except BlockingIOError:
            pass
        os.close(handle)
        return None


def _key(url: str, digest: str) -> str:
    return f"{digest}-{xxhash.xxh3_64_hexdigest(url.encode())}"


def _bytes_in(directory: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for path in directory.iterdir():
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
    return total
