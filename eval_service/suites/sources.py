"""The files that a suite was read from: what they held then, and which of them hold something else by now."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import xxhash

LOOK_S = 30.0  # a point waits no longer to learn what the files of its suite hold
_CHUNK_BYTES = 1 << 20
_Seen = tuple[int, int, int]  # inode, size, and when it was written


@dataclass(frozen=True, slots=True)
class Source:
    """A file, and the digest of its bytes as they were read."""

    path: Path
    digest: str
    seen: _Seen

    @classmethod
    def read(cls, path: Path) -> tuple[Source, bytes]:
        """A file's bytes, and what to know them by.

        Raises:
            OSError: it can't be read.
        """
        seen = _seen(path)  # before the bytes: what is written meanwhile is looked at again
        data = path.read_bytes()
        return cls(path, xxhash.xxh3_128_hexdigest(data), seen), data

    def now(self) -> str | None:
        """The digest of what the file holds now, read only where it was written since; None: it can't be read."""
        try:
            return self.digest if _seen(self.path) == self.seen else digest_of(self.path)
        except OSError:
            return None


def digest_of(path: Path) -> str:
    """The digest of a file's bytes; it is read again only where it was written since.

    Raises:
        OSError: it can't be read.
    """
    return _digest(path, _seen(path))


def changed(sources: Iterable[Source]) -> list[tuple[Source, str | None]]:
    """Those that hold something else than was read, with the digest of what they hold."""
    looked = [(source, source.now()) for source in sources]
    return [(source, now) for source, now in looked if now != source.digest]


def module_beside(function: str, base: Path) -> Path | None:
    """The file of `module:name`, where it lies in the directory; None of one that is installed."""
    path = base.joinpath(*function.partition(":")[0].split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _seen(path: Path) -> _Seen:
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


@lru_cache(maxsize=256)
def _digest(path: Path, _: _Seen) -> str:
    hashed = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hashed.update(chunk)
    return hashed.hexdigest()
