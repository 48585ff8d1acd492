"""Deleting snapshots from an object store, under the guards that directories have: path, nonce and ledger must agree.

The marker goes first, so that nobody takes half a snapshot for one, then the ledger is asked for the last time: one
that was dispatched again meanwhile gets its marker back. The manifest goes last, and only then the ledger is told: so a
deletion that was cut short is known for what it is, and is finished. Who uploads the same content again meanwhile sees
a mark and does so once more when it is gone (`objects.deleting`). Blocks: call it from a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from eval_service.contract import names
from eval_service.contract.errors import SnapshotFault, SnapshotMissing
from eval_service.contract.manifest import Manifest, parse_manifest, read_manifest
from eval_service.gc.collect import Collected, Refused
from eval_service.gc.plan import Deletion
from eval_service.objects.config import ObjectsConfig
from eval_service.objects.deleting import DELETE_S, marked, unmark
from eval_service.objects.fetch import MANIFEST_BYTES, size_of
from eval_service.objects.places import Places
from eval_service.objects.store import Denied, ObjectStore, Until
from eval_service.objects.urls import is_url, join, last_of, lies_under, parent_of

READ_S = 60.0


def collect_objects(
    deletion: Deletion, store: ObjectStore, confirm: Callable[[], bool], gone: Callable[[], object]
) -> Collected:
    """Delete one snapshot's objects; what is gone already is a success of 0 bytes.

    Args:
        confirm: called when nobody can take it for a whole one any more; what it does not confirm is put back.
        gone: called when nothing of it is left.

    Raises:
        Refused: path, step, digest or nonce disagree with what lies there, it lies under no prefix, or the store does
            not allow it.
        StoreUnavailable: the store can't be reached.
    """
    until = Until.after(DELETE_S)
    name = _own_name(deletion, store.config)
    try:
        if _held(deletion, store, until) is None:
            unmark(store, deletion.path, until)  # of one that was cut short
            freed_bytes = 0 if confirm() else None
        else:
            with marked(store, deletion.path, until):
                freed_bytes = _delete(deletion, store, confirm, until)
    except Denied as exc:
        raise Refused(exc.message, field="path") from exc
    if freed_bytes is None:
        return Collected(name, 0)
    gone()
    return Collected(name, freed_bytes)


def manifest_of(path: str, places: Places) -> Manifest:
    """The manifest of a snapshot wherever it lies.

    Raises:
        SnapshotFault: there is none, or it is damaged.
    """
    if not is_url(path):
        return read_manifest(Path(path))
    return _read(path, places.cache.store, Until.after(READ_S))


def sweep(places: Places) -> None:
    """Remove what killed processes left in this node's cache, and what is beyond its bound."""
    if places.caches:
        places.cache.sweep()


def _delete(deletion: Deletion, store: ObjectStore, confirm: Callable[[], bool], until: Until) -> int | None:
    """Delete what lies there, with the mark beside it; the bytes of it, or None: it is needed, and is put back."""
    manifest = _held(deletion, store, until)
    if manifest is None:
        return 0 if confirm() else None
    marker = join(deletion.path, names.COMPLETE)
    store.delete(marker, until)
    if not confirm():
        store.put(marker, b"", until)
        return None
    for file in (*(entry.name for entry in manifest.files), names.DISPATCH, names.MANIFEST):
        store.delete(join(deletion.path, file), until)
    return size_of(manifest)


def _own_name(deletion: Deletion, config: ObjectsConfig) -> str:
    """The last segment, if the URL lies under a prefix, directly in the run's own part, and names step and digest."""
    name, run = last_of(deletion.path), last_of(parent_of(deletion.path))
    if not any(lies_under(deletion.path, prefix) for prefix in config.prefixes):
        raise Refused(f"{deletion.path} lies under none of the object prefixes", field="path")
    if not names.NONCE.fullmatch(deletion.nonce):
        raise Refused(f"{deletion.nonce!r} is no nonce", field="nonce")
    if run != names.check_run(deletion.run):
        raise Refused(f"{deletion.path} does not lie in the run's own {deletion.run}/", field="path")
    if names.parse_step_dir(name) != (deletion.step, deletion.digest[:8]):
        raise Refused(f"{name} is not the name of step {deletion.step} and {deletion.digest[:8]}", field="path")
    return name


def _held(deletion: Deletion, store: ObjectStore, until: Until) -> Manifest | None:
    """The manifest that lies there, if it is that of this very export; None: nothing is there any more."""
    try:
        manifest = _read(deletion.path, store, until)
    except Denied:
        raise
    except SnapshotMissing:
        return None
    except SnapshotFault as exc:
        raise Refused(f"{deletion.path}: {exc}", field="path") from exc
    held = (manifest.run, manifest.step, manifest.digest, manifest.nonce)
    if held != (deletion.run, deletion.step, deletion.digest, deletion.nonce):
        raise Refused(f"{deletion.path} is another export than the ledger's", field="nonce")
    return manifest


def _read(url: str, store: ObjectStore, until: Until) -> Manifest:
    return parse_manifest(store.read(join(url, names.MANIFEST), until, most_bytes=MANIFEST_BYTES))
