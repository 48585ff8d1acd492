"""A point's samples as Parquet: one row a sample, in the order of `index`.

A file is there whole or not at all (written beside, synced, renamed). Writing holds one batch, reading the rows that
were asked for and two narrow columns.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eval_service.contract.errors import NotFound
from eval_service.contract.wire import SamplePage, SampleView

_ROW_GROUP = 4096

SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("prompt", pa.large_string(), nullable=False),
        pa.field("answer", pa.large_string(), nullable=False),
        pa.field("output", pa.large_string(), nullable=False),
        pa.field("score", pa.float64()),
        pa.field("error", pa.string()),
        pa.field("finish_reason", pa.string()),
        pa.field("prompt_tokens", pa.int64(), nullable=False),
        pa.field("output_tokens", pa.int64(), nullable=False),
        pa.field("engine", pa.string(), nullable=False),
        pa.field("weight_version", pa.string(), nullable=False),
        pa.field("latency_s", pa.float64(), nullable=False),
        pa.field("logprob", pa.float64()),
    ]
)


class Which(StrEnum):
    """Which samples are asked for."""

    ALL = "all"
    WRONG = "wrong"  # scored, below 1
    ERRORED = "errored"  # no score, for a reason


def write_samples(path: Path, samples: Iterable[SampleView]) -> int:
    """Write a point's samples, replacing what was there in one step; returns how many.

    Raises:
        OSError: the disk is full, say, or a link leads out of the run's directory; nothing is left behind then.
    """
    if path.parent.parent.is_symlink():
        raise _leads_out(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check_place(handle, path.parent)
        return _write_in(handle, path.name, samples)
    finally:
        os.close(handle)


def _check_place(handle: int, directory: Path) -> None:
    """A link planted in the run's own directory must not lead what we write out of it.

    Raises:
        OSError: `ELOOP`, where it would.
    """
    run = directory.parent
    own = os.stat(run.parent.resolve() / run.name / directory.name, follow_symlinks=False)
    opened = os.fstat(handle)
    if (own.st_dev, own.st_ino) != (opened.st_dev, opened.st_ino):
        raise _leads_out(directory)


def _leads_out(directory: Path) -> OSError:
    return OSError(errno.ELOOP, f"{directory} is a link, or lies behind one: samples go into the run's own directory")


def _write_in(handle: int, name: str, samples: Iterable[SampleView]) -> int:
    beside = f".{name}.{uuid.uuid4().hex}"
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=handle), "wb") as file:
            count = _write_batches(file, iter(samples))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, name, src_dir_fd=handle, dst_dir_fd=handle)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(beside, dir_fd=handle)
    os.fsync(handle)
    return count


def read_samples(path: Path, *, offset: int = 0, limit: int = 100, which: Which = Which.ALL) -> SamplePage:
    """One page of a point's samples; `total` counts all that match.

    Raises:
        NotFound: no such file.
    """
    try:
        file = pq.ParquetFile(path)
    except FileNotFoundError as exc:
        raise NotFound(f"there are no samples at {path}") from exc
    with file:
        matching = _matching(file, which)
        rows = [row for row in matching[offset : offset + limit]]
        return SamplePage(samples=tuple(_views(file, rows)), total=len(matching))


def _write_batches(file: Any, samples: Iterator[SampleView]) -> int:
    count = 0
    with pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        while batch := [sample.model_dump() for sample in islice(samples, _ROW_GROUP)]:
            writer.write_table(pa.Table.from_pylist(batch, schema=SCHEMA))
            count += len(batch)
    return count


def _matching(file: Any, which: Which) -> Any:
    """The numbers of the rows that match, in order."""
    if which is Which.ALL:
        return range(file.metadata.num_rows)
    table = file.read(columns=["score", "error"])
    wanted = pc.less(table["score"], 1.0) if which is Which.WRONG else pc.is_valid(table["error"])
    return pc.indices_nonzero(pc.fill_null(wanted, False)).to_pylist()


def _views(file: Any, rows: list[int]) -> Iterator[SampleView]:
    """The samples of these rows (ascending), reading only the row groups that hold them."""
    start = 0
    for group in range(file.num_row_groups):
        end = start + file.metadata.row_group(group).num_rows
        here = [row - start for row in rows if start <= row < end]
        if here:
            for sample in file.read_row_group(group).take(here).to_pylist():
                yield SampleView.model_validate(sample)
        start = end
