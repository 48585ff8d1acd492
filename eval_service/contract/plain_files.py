"""Opening files that others wrote: a pipe or a device in a file's place is refused, and never waited for."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file to read; a link is followed.

    Raises:
        OSError: as the file system has it; `EINVAL` for what is no regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "is no plain file", str(path))
        yield file


def read_plain(path: Path) -> bytes:
    """All of a regular file.

    Raises:
        OSError: as `open_plain`.
    """
    with open_plain(path) as file:
        return file.read()
