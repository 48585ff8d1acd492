"""Where a snapshot lies: inside the allowed roots, with no link that leads out, and which files it has."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path

from eval_service.admission.faults import Findings
from eval_service.contract.errors import SnapshotUnsafe
from eval_service.contract.manifest import check_file_name


def check_inside(directory: Path, roots: Sequence[Path]) -> tuple[Path, Path]:
    """Resolve a snapshot's path and find the root that it lies in; used again where the snapshot is loaded.

    Args:
        roots: the allowed ones; links in them are resolved here too.

    Returns:
        The resolved directory (which need not exist) and its resolved root.

    Raises:
        SnapshotUnsafe: a relative path, or one that lies in no root once its links are followed.
    """
    resolved = resolve(directory)
    if not directory.is_absolute():
        raise SnapshotUnsafe(f"{directory} is a relative path", field="snapshot", hint="send an absolute path")
    for root in (root.resolve() for root in roots):
        if resolved.is_relative_to(root):
            return resolved, root
    listed = ", ".join(str(root) for root in roots) or "none"
    raise SnapshotUnsafe(
        f"{directory} lies outside the allowed roots",
        field="snapshot",
        hint=f"the service's roots are: {listed}; add its root to service.roots in fleet.toml, or move the snapshot",
    )


def list_files(directory: Path, bound: Path, findings: Findings) -> dict[str, int]:
    """Name and size of each regular file at the top level, links that stay inside `bound` followed.

    A link that leads out, and anything that is neither file nor directory, is a fault and is not in the result.
    """
    sizes: dict[str, int] = {}
    try:
        entries = sorted(directory.iterdir())
    except OSError as exc:
        findings.invalid("snapshot", f"{directory} can't be read: {exc.strerror}", "give the service read access")
        return sizes
    for entry in entries:
        try:
            if entry.is_symlink() and not _link_stays(entry, bound, findings):
                continue
            info = entry.stat()
        except OSError as exc:
            findings.invalid(entry.name, f"can't be read: {exc.strerror}", "was it removed while it was checked?")
            continue
        if stat.S_ISREG(info.st_mode) and not _can_be_listed(entry.name):
            findings.unsafe(entry.name, "its name can't be listed in a manifest", "rename or remove it")
        elif stat.S_ISREG(info.st_mode):
            sizes[entry.name] = info.st_size
        elif not stat.S_ISDIR(info.st_mode):
            findings.unsafe(entry.name, "is neither a file nor a directory", "remove it")
    return sizes


def _can_be_listed(name: str) -> bool:
    try:
        check_file_name(name)
    except ValueError:
        return False
    return True


def _link_stays(link: Path, bound: Path, findings: Findings) -> bool:
    try:
        target = resolve(link)
    except SnapshotUnsafe as exc:
        findings.unsafe(link.name, exc.message, "put the file itself there")
        return False
    if not target.is_relative_to(bound):
        findings.unsafe(link.name, f"is a link that leads out of {bound}", "put the file itself there")
        return False
    if not target.exists():
        findings.invalid(link.name, "is a link to nothing", "put the file itself there", may_appear=True)
        return False
    return True


def resolve(path: Path) -> Path:
    """Follow every link of a path, which need not exist.

    Raises:
        SnapshotUnsafe: a loop of links, or a name that can't be one.
    """
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as exc:
        raise SnapshotUnsafe(f"{str(path)!r} can't be resolved: {exc}", field="snapshot") from exc
