"""Deleting, with the care that a wrong plan, a renamed directory or a planted link can do no harm.

A snapshot is renamed to `.trash-<nonce>` in its own run's root and then removed, so no reader ever sees half of one. In
between the ledger is asked for the last time: one that was dispatched again meanwhile is put back. Everything is done
relative to an open handle of the run's root; no link is followed. Blocks: call it from a thread.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from eval_service.contract import names
from eval_service.contract.errors import EvalfleetError, SnapshotFault
from eval_service.contract.manifest import read_manifest
from eval_service.gc.plan import Deletion, Leftover, LeftoverKind


class Refused(EvalfleetError):
    """A directory is not what the plan says, so it is left alone."""

    code = "gc_refused"
    status = 409


@dataclass(frozen=True, slots=True)
class Collected:
    """A directory that is gone now. `freed_bytes` counts no file that another name still holds."""

    name: str
    freed_bytes: int


def collect(deletion: Deletion, root: Path, confirm: Callable[[], bool]) -> Collected:
    """Delete one snapshot; one that is gone already (an earlier try was cut short) is a success of 0 bytes.

    Args:
        root: the run's configured root, under which `<run>/` lies.
        confirm: called when nobody can find the snapshot any more; what it does not confirm is put back.

    Raises:
        Refused: path, step, digest or nonce disagree with what lies there, or it lies elsewhere.
        OSError: the file system would not have it.
    """
    name = _own_name(deletion, root)
    trash = names.trash_name(deletion.nonce)
    with _run_root(root, deletion.run) as handle:
        freed = 0
        if handle is not None and _is_there(handle, name):
            _check_ours(deletion, names.run_dir(root, deletion.run) / name)
            freed = _remove(handle, trash)  # of a try that was cut short
            os.rename(name, trash, src_dir_fd=handle, dst_dir_fd=handle)
        if confirm():
            freed += _remove(handle, trash) if handle is not None else 0
        elif handle is not None:
            _put_back(handle, trash, name)
    return Collected(name, freed)


def tend_trash(leftover: Leftover, root: Path, needed: Mapping[str, bool]) -> Collected:
    """Finish what a deletion that was cut short began, or undo it.

    Args:
        needed: by the name of a snapshot's directory, whether somebody needs it: true, it is put back; false, it is
            claimed for deletion and is left to that. One that is not named is removed.

    Raises:
        Refused, OSError: as `remove_leftover`.
    """
    directory = names.run_dir(root, leftover.run) / leftover.name
    try:
        manifest = read_manifest(directory)
    except SnapshotFault:  # its manifest is the first to go
        return remove_leftover(leftover, root)
    name = names.step_dir_name(manifest.step, manifest.digest)
    if name not in needed:
        return remove_leftover(leftover, root)
    with _run_root(root, leftover.run) as handle:
        if handle is not None and needed[name] and not _put_back(handle, leftover.name, name):
            return Collected(leftover.name, _remove(handle, leftover.name))
    return Collected(leftover.name, 0)


def find_leftovers(root: Path, run: str) -> list[Leftover]:
    """The `.partial-*`, `.trash-*` and `.held-*` directories of a run, and its half-written files; reads only."""
    found = []
    with _run_root(root, run) as handle:
        if handle is None:
            return []
        for entry in sorted(os.listdir(handle)):
            kind = _kind(entry)
            if kind is None:
                continue
            try:
                touched_at = _touched_at(handle, entry)
            except (OSError, Refused):
                continue  # published or removed while we looked, or no directory of ours
            found.append(Leftover(run, entry, kind, touched_at))
        for place in _PLACES_OF_FILES:
            half = _half_written(handle, place)
            found += [Leftover(run, f"{place}/{name}", LeftoverKind.HALF, at) for name, at in half]
    return found


def remove_leftover(leftover: Leftover, root: Path) -> Collected:
    """Delete one leftover.

    Raises:
        Refused: its name is not that of a leftover, or the run's root is not its own.
        OSError: the file system would not have it.
    """
    if _kind(leftover.name) is not leftover.kind:
        raise Refused(f"{leftover.name!r} is not the name of a leftover", field="name")
    with _run_root(root, leftover.run) as handle:
        remove = _remove_file if leftover.kind is LeftoverKind.HALF else _remove
        return Collected(leftover.name, remove(handle, leftover.name) if handle is not None else 0)


def remove_held(root: Path, run: str, name: str) -> None:
    """Delete a directory of hard links; what they are links to keeps its other names.

    Raises:
        Refused: its name is not that of one, or the run's root is not its own.
        OSError: the file system would not have it.
    """
    remove_leftover(Leftover(run, name, LeftoverKind.HELD, 0.0), root)


def remove_results(root: Path, run: str) -> None:
    """Delete a run's samples, as its deletion asks for.

    Raises:
        Refused: the run's root is not its own.
        OSError: the file system would not have it.
    """
    with _run_root(root, run) as handle:
        if handle is not None:
            _remove(handle, names.EVALS)


_KINDS = {
    names.PARTIAL_PREFIX: LeftoverKind.PARTIAL,
    names.TRASH_PREFIX: LeftoverKind.TRASH,
    names.HELD_PREFIX: LeftoverKind.HELD,
}
_PLACES_OF_FILES = (names.EVALS, names.OUTBOX)


def _put_back(handle: int, trash: str, name: str) -> bool:
    """Undo a rename; False where nothing was renamed, or another export took the place."""
    if not _is_there(handle, trash) or _is_there(handle, name):
        return False
    os.rename(trash, name, src_dir_fd=handle, dst_dir_fd=handle)
    return True


def _own_name(deletion: Deletion, root: Path) -> str:
    """The directory's name, if its path is directly in the run's own root and names its step and digest."""
    path, own = Path(deletion.path), names.run_dir(root, deletion.run)
    if not names.NONCE.fullmatch(deletion.nonce):
        raise Refused(f"{deletion.nonce!r} is no nonce", field="nonce")
    # It is known as its trainer wrote it, which may be by way of a link; nothing is done by that name.
    if not {path.parent, path.parent.resolve()} & {own, own.parent.resolve() / own.name}:
        raise Refused(f"{path} does not lie in the run's own root {own}", field="path")
    if names.parse_step_dir(path.name) != (deletion.step, deletion.digest[:8]):
        raise Refused(f"{path.name} is not the name of step {deletion.step} and {deletion.digest[:8]}", field="path")
    return path.name


def _check_ours(deletion: Deletion, directory: Path) -> None:
    if (directory / names.MANIFEST).is_symlink():
        raise Refused(f"{directory.name}: its manifest is a link", field="path")
    try:
        manifest = read_manifest(directory)
    except SnapshotFault as exc:
        raise Refused(f"{directory.name}: {exc}", field="path") from exc
    held = (manifest.run, manifest.step, manifest.digest, manifest.nonce)
    if held != (deletion.run, deletion.step, deletion.digest, deletion.nonce):
        raise Refused(f"{directory.name} is another export than the ledger's", field="nonce")


@contextmanager
def _run_root(root: Path, run: str) -> Iterator[int | None]:
    """A handle of `<root>/<run>`, which must be a directory itself and no link; None where there is nothing."""
    own = root.resolve() / names.check_run(run)
    try:
        handle = os.open(own, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield None
        return
    except OSError as exc:
        raise Refused(f"{own} can't be opened as a directory: {exc.strerror}", field="root") from exc
    try:
        yield handle
    finally:
        os.close(handle)


def _kind(name: str) -> LeftoverKind | None:
    for prefix, kind in _KINDS.items():
        if name.startswith(prefix) and names.NONCE.fullmatch(name.removeprefix(prefix)):
            return kind
    place, _, file = name.partition("/")
    return LeftoverKind.HALF if place in _PLACES_OF_FILES and names.BESIDE.fullmatch(file) else None


def _half_written(handle: int, place: str) -> Iterator[tuple[str, float]]:
    """Name and newest change of each file in a directory of the run that was not put in its place (yet)."""
    with _own_directory(handle, place) as where:
        for name in sorted(os.listdir(where)) if where is not None else ():
            if names.BESIDE.fullmatch(name):
                with suppress(FileNotFoundError):  # it is in its place now
                    info = os.stat(name, dir_fd=where, follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode):
                        yield name, info.st_mtime


def _remove_file(handle: int, name: str) -> int:
    place, _, file = name.partition("/")
    with _own_directory(handle, place) as where:
        if where is None:
            return 0
        with suppress(FileNotFoundError):
            size = os.stat(file, dir_fd=where, follow_symlinks=False).st_size
            os.unlink(file, dir_fd=where)
            return size
    return 0


@contextmanager
def _own_directory(handle: int, name: str) -> Iterator[int | None]:
    """A handle of a directory of the run that is no link; None where there is none."""
    try:
        where = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
    except OSError as exc:
        if exc.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        yield None
        return
    try:
        yield where
    finally:
        os.close(where)


def _is_there(handle: int, name: str) -> bool:
    """Whether `name` is a directory.

    Raises:
        Refused: it is something else, such as a link.
    """
    try:
        mode = os.stat(name, dir_fd=handle, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(mode):
        raise Refused(f"{name} is no directory", field="path")
    return True


def _remove(handle: int, name: str) -> int:
    if not _is_there(handle, name):
        return 0
    freed = 0
    for _, _, files, where in os.fwalk(name, dir_fd=handle, follow_symlinks=False):
        for file in files:
            info = os.stat(file, dir_fd=where, follow_symlinks=False)
            freed += info.st_size if info.st_nlink == 1 else 0
        if names.MANIFEST in files:  # first, so that half a snapshot is never taken for one
            os.unlink(names.MANIFEST, dir_fd=where)
    shutil.rmtree(name, dir_fd=handle)
    return freed


def _touched_at(handle: int, name: str) -> float:
    if not _is_there(handle, name):
        raise FileNotFoundError(name)
    newest = os.stat(name, dir_fd=handle, follow_symlinks=False).st_mtime
    for _, _, files, where in os.fwalk(name, dir_fd=handle, follow_symlinks=False):
        for file in files:
            newest = max(newest, os.stat(file, dir_fd=where, follow_symlinks=False).st_mtime)
    return newest
