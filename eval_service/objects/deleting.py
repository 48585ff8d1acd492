"""A mark that lies beside a snapshot's objects while they are deleted, for whoever uploads the same content meanwhile.

Who deletes writes the mark and then reads whose manifest lies there; who uploads writes manifest and marker, waits
until there is no mark, and then sees whether all is there. A store shows what was written, so one of the two sees the
other: another export is left alone, or what went with the old one is uploaded again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from eval_service.contract.errors import SnapshotMissing, StoreUnavailable
from eval_service.objects.store import Denied, ObjectStore, Until
from eval_service.objects.urls import join

DELETE_S = 600.0  # a deletion takes no longer; a mark that is older was left by one that was killed
LOOK_S = 0.5
_MARK = ".deleting"


@contextmanager
def marked(store: ObjectStore, url: str, until: Until) -> Iterator[None]:
    """Let the mark lie there meanwhile."""
    store.put(join(url, _MARK), f"{time.time():.3f}".encode(), until)
    try:
        yield
    finally:
        try:
            unmark(store, url, until)
        except Denied:  # nobody is to wait for what may not be deleted
            store.put(join(url, _MARK), b"", until)
            raise


def unmark(store: ObjectStore, url: str, until: Until) -> None:
    """Take away the mark, if there is one."""
    store.delete(join(url, _MARK), until)


def wait_unmarked(store: ObjectStore, url: str, until: Until) -> None:
    """Wait until nobody deletes it.

    Raises:
        StoreUnavailable: somebody still does at the deadline.
    """
    while _is_marked(store, url, until):
        if until.left_s <= LOOK_S:
            raise StoreUnavailable(f"{url} is being deleted", field="snapshot")
        store.sleep(LOOK_S)


def _is_marked(store: ObjectStore, url: str, until: Until) -> bool:
    try:
        told = store.read(join(url, _MARK), until, most_bytes=64)
    except SnapshotMissing:
        return False
    try:
        return abs(time.time() - float(told)) < DELETE_S
    except ValueError:
        return False
