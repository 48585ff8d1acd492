"""Publishing a snapshot to an object store: one that was published to a directory is copied, the marker last.

What somebody deletes at that moment is uploaded when that is done; see `deleting`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from eval_service.contract import names
from eval_service.contract.errors import SnapshotFault, SnapshotMissing
from eval_service.contract.manifest import Manifest, read_manifest
from eval_service.contract.safetensors_io import hash_file
from eval_service.objects.abreast import abreast
from eval_service.objects.config import ObjectsConfig
from eval_service.objects.deleting import wait_unmarked
from eval_service.objects.fetch import read_remote_manifest, size_of
from eval_service.objects.store import ObjectStore, Until
from eval_service.objects.urls import check_url, join

UPLOAD_S = 3600.0


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A snapshot that consumers may trust, in an object store."""

    url: str
    manifest: Manifest
    reused: bool  # it was there already, with the same digest

    @property
    def size_bytes(self) -> int:
        """Of the model's files."""
        return size_of(self.manifest)


def upload(
    snapshot: Path, prefix: str, *, store: ObjectStore | None = None, timeout_s: float = UPLOAD_S, parallel: int = 4
) -> Uploaded:
    """Copy a published snapshot to `<prefix>/<run>/step_<step>-<digest8>`.

    Args:
        snapshot: its directory, with manifest and marker.
        prefix: such as `s3://bucket/evals`.
        store: how stores are reached; None: as their own environment variables say.

    Raises:
        SnapshotFault: it is not a whole snapshot, its bytes are not what its manifest says, or another one is there.
        InvalidRequest: the store does not take it.
        StoreUnavailable: the store can't be reached.
    """
    prefix = check_url(prefix, "prefix")
    store = store or ObjectStore(ObjectsConfig(prefixes=(prefix,)))
    store.check()
    until = Until.after(timeout_s)
    manifest = _whole(snapshot)
    url = join(join(prefix, manifest.run), names.step_dir_name(manifest.step, manifest.digest))
    reused = True
    while True:
        wait_unmarked(store, url, until)
        if _is_there(store, url, manifest, until):
            return Uploaded(url, manifest, reused=reused)
        reused = False
        parts = [
            partial(store.put_file, join(url, entry.name), snapshot / entry.name, until) for entry in manifest.files
        ]
        abreast(parts, parallel, threading.Event(), name="upload")
        store.put(join(url, names.MANIFEST), manifest.model_dump_json().encode(), until)
        store.put(join(url, names.COMPLETE), b"", until)


def _whole(snapshot: Path) -> Manifest:
    """The manifest, once every file is what it says."""
    if not (snapshot / names.COMPLETE).is_file():
        hint = "publish it first; see docs/object_stores.md"
        raise SnapshotMissing(f"{snapshot} has no marker {names.COMPLETE}", field="snapshot", hint=hint)
    manifest = read_manifest(snapshot)
    for entry in manifest.files:
        if hash_file(snapshot / entry.name) != entry:
            raise SnapshotFault("is not what the manifest says", field=entry.name, hint="export it anew")
    return manifest


def _is_there(store: ObjectStore, url: str, manifest: Manifest, until: Until) -> bool:
    """Whether this very snapshot was published there, and nothing of it is gone."""
    try:
        held, _ = read_remote_manifest(store, url, until)
    except SnapshotMissing:
        return False
    if held.digest != manifest.digest:
        raise SnapshotFault(f"{url} is there already and is another snapshot", field="snapshot")
    return all(store.size(join(url, entry.name), until) == entry.size_bytes for entry in manifest.files)
