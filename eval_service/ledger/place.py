"""Where a SQLite ledger may lie: not on a network file system, whose locks and shared memory can't be trusted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from eval_service.contract.errors import ConfigError

MOUNTS = Path("/proc/mounts")
NETWORK = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "coda", "davfs", "9p", "virtiofs"),
        *("lustre", "gpfs", "mmfs", "beegfs", "fhgfs", "ceph", "glusterfs", "gfs2", "ocfs2", "orangefs", "pvfs2"),
        *("panfs", "quobyte", "wekafs"),
        *("fuse.sshfs", "fuse.ceph", "fuse.cephfs", "fuse.glusterfs", "fuse.beegfs", "fuse.moosefs", "fuse.mfs"),
        *("fuse.juicefs", "fuse.gcsfuse", "fuse.s3fs", "fuse.goofys", "fuse.mount-s3", "fuse.rclone"),
    }
)


def read_mounts() -> str:
    """The kernel's table of mounts; empty where there is none."""
    try:
        return MOUNTS.read_text(errors="surrogateescape")
    except OSError:
        return ""


def check_local(path: Path, *, mounts: Callable[[], str] = read_mounts) -> None:
    """Refuse a SQLite file on a network file system.

    Raises:
        ConfigError: with the mount and its type.
    """
    found = _mount_of(path.resolve(), mounts())
    if found is not None and found[1] in NETWORK:
        raise ConfigError(
            f"{path} lies on {found[0]}, a network file system ({found[1]}), which SQLite can't be trusted with",
            field="service.ledger",
            hint="set service.state_dir to a directory on this node's own disk",
        )


def _mount_of(path: Path, mounts: str) -> tuple[Path, str] | None:
    """The innermost mount that holds the path; of several on one another, the last."""
    found: tuple[Path, str] | None = None
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(_unescaped(fields[1]))
        if path.is_relative_to(point) and (found is None or len(point.parts) >= len(found[0].parts)):
            found = (point, fields[2])
    return found


def _unescaped(text: str) -> str:
    """The kernel writes blanks and backslashes of a name as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
