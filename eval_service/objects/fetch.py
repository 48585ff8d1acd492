"""Bringing one published snapshot from an object store into a directory, every byte compared with its manifest."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path

import xxhash

from eval_service.contract import names
from eval_service.contract.errors import SnapshotAltered, SnapshotFault, SnapshotMissing
from eval_service.contract.manifest import FileEntry, Manifest, parse_manifest
from eval_service.objects.abreast import abreast
from eval_service.objects.store import ObjectStore, Until
from eval_service.objects.urls import join

MANIFEST_BYTES = 256 << 20  # of a model with very many tensors
_TRIES = 2  # at an object whose bytes are others than they should be: it may have been the way here


def read_remote_manifest(store: ObjectStore, url: str, until: Until) -> tuple[Manifest, bytes]:
    """The manifest of a snapshot that was published whole, and its bytes.

    Raises:
        SnapshotMissing: the marker, which is written last, or the manifest is not there (yet).
        SnapshotFault: the manifest is none of ours, or lists a name that no model's file has.
        StoreUnavailable: the store can't be reached.
    """
    if store.size(join(url, names.COMPLETE), until) is None:
        raise SnapshotMissing(f"{url} has no marker {names.COMPLETE}", field="snapshot", hint="is it being uploaded?")
    data = store.read(join(url, names.MANIFEST), until, most_bytes=MANIFEST_BYTES)
    manifest = parse_manifest(data)
    for entry in manifest.files:
        if entry.name in names.BESIDE_THE_MODEL or entry.name.startswith("."):
            raise SnapshotFault("is not the name of a model's file", field=entry.name, hint="export it anew")
    return manifest, data


def size_of(manifest: Manifest) -> int:
    """Bytes of the model's files."""
    return sum(entry.size_bytes for entry in manifest.files)


def fetch_into(
    directory: Path, store: ObjectStore, url: str, manifest: Manifest, data: bytes, until: Until, *, parallel: int
) -> None:
    """Fetch every file that the manifest lists, then write manifest and marker; all synced.

    Args:
        directory: there, and empty.
        data: the manifest's own bytes.

    Raises:
        SnapshotAltered: an object is cut short, was changed, or is gone; names it.
        StoreUnavailable: the store can't be reached.
        OSError: disk full, among others.
    """
    stop = threading.Event()
    parts = [partial(_fetch_file, directory / entry.name, store, url, entry, until, stop) for entry in manifest.files]
    abreast(parts, parallel, stop, name="fetch")
    _write_synced(directory / names.MANIFEST, data)
    _write_synced(directory / names.COMPLETE, b"")


def _fetch_file(
    target: Path, store: ObjectStore, url: str, entry: FileEntry, until: Until, stop: threading.Event
) -> None:
    source = join(url, entry.name)
    hint = "what was published must not be changed; upload it anew"
    seen = ""
    for _ in range(_TRIES):
        size = store.size(source, until)
        if size is None:
            raise SnapshotAltered(f"the manifest lists it, and {source} is not there", field=entry.name, hint=hint)
        if size != entry.size_bytes:
            told = f"{source} has {size} bytes; the manifest says {entry.size_bytes}"
            raise SnapshotAltered(told, field=entry.name, hint=hint)
        seen = _copy(target, store, source, size, until, stop)
        if seen == entry.xxh3_128 or stop.is_set():
            return
    told = f"the bytes of {source} have the hash {seen}; the manifest has {entry.xxh3_128}"
    raise SnapshotAltered(told, field=entry.name, hint=hint)


def _copy(target: Path, store: ObjectStore, source: str, size: int, until: Until, stop: threading.Event) -> str:
    """Copy an object, and return the hash of what came."""
    state = xxhash.xxh3_128()
    with target.open("wb") as file:
        for chunk in store.chunks(source, size, until):
            if stop.is_set():
                return ""
            state.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return state.hexdigest()


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
