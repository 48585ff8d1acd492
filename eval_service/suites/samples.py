"""A point's samples as Parquet: one row a sample, in the order of `index`.

A file is there whole or not at all (written beside, synced, renamed). Writing holds one batch. Reading a page holds the
row groups that it lies in; what is looked for decides by narrow columns, and by the groups' own statistics where those
tell that none of a group matches. A text is looked for in one group at a time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eval_service.contract import names
from eval_service.contract.errors import NotFound
from eval_service.contract.results import SamplePage, SampleView

_ROW_GROUP = 4096
_SEARCHED = ("prompt", "output", "answer", "error")

SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("prompt_index", pa.int64(), nullable=False),
        pa.field("sample_index", pa.int64(), nullable=False),
        pa.field("seed", pa.int64()),
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("prompt", pa.large_string(), nullable=False),
        pa.field("answer", pa.large_string(), nullable=False),
        pa.field("output", pa.large_string(), nullable=False),
        pa.field("score", pa.float64()),
        pa.field("error", pa.string()),
        pa.field("unparsed", pa.bool_(), nullable=False),
        pa.field("finish_reason", pa.string()),
        pa.field("prompt_tokens", pa.int64(), nullable=False),
        pa.field("output_tokens", pa.int64(), nullable=False),
        pa.field("engine", pa.string(), nullable=False),
        pa.field("weight_version", pa.string(), nullable=False),
        pa.field("latency_s", pa.float64(), nullable=False),
        pa.field("logprob", pa.float64()),
        pa.field("more", pa.map_(pa.string(), pa.float64())),
        pa.field("note", pa.large_string()),
    ]
)


class Which(StrEnum):
    """Which samples are asked for; of several, those of any."""

    ALL = "all"
    WRONG = "wrong"  # scored, below 1
    ERRORED = "errored"  # no score, for a reason
    TRUNCATED = "truncated"  # cut by max_new_tokens
    EMPTY = "empty"  # answered, with nothing but white space
    UNPARSED = "unparsed"  # no extractor found an answer


class SampleSort(StrEnum):
    """The order of samples, by one of their numbers; those without it come last."""

    INDEX = "index"
    INDEX_DOWN = "-index"
    SCORE = "score"
    SCORE_DOWN = "-score"
    TOKENS = "output_tokens"
    TOKENS_DOWN = "-output_tokens"
    LATENCY = "latency_s"
    LATENCY_DOWN = "-latency_s"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What samples are looked for: some kinds (none: all of them), and a text in prompt, output, answer or error; and
    in which order."""

    kinds: frozenset[Which] = frozenset()
    text: str = ""
    sort: SampleSort = SampleSort.INDEX

    @classmethod
    def of(cls, kinds: Collection[Which] = (), text: str | None = None, sort: SampleSort = SampleSort.INDEX) -> Wanted:
        """`all` among the kinds is all."""
        return cls(frozenset() if Which.ALL in kinds else frozenset(kinds), text or "", sort)


def write_samples(path: Path, samples: Iterable[SampleView], *, former: Iterable[Path] = ()) -> int:
    """Write a point's samples, replacing what was there in one step; returns how many.

    Args:
        former: files beside it that go with it, where they are there: of attempts that came to no result.

    Raises:
        OSError: the disk is full, say, or a link leads out of the run's directory; nothing is left behind then.
    """
    if path.parent.parent.is_symlink():
        raise _leads_out(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check_place(handle, path.parent)
        count = _write_in(handle, path.name, samples)
        for other in former:
            with suppress(OSError):  # what can't be removed costs no result
                os.unlink(other.name, dir_fd=handle)
        return count
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
    beside = names.beside(name)
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


def read_samples(path: Path, *, offset: int = 0, limit: int = 100, wanted: Wanted = Wanted()) -> SamplePage:
    """One page of a point's samples; `total` counts all that match.

    Raises:
        NotFound: no such file.
    """
    with open_samples(path) as file:
        matching = _sorted(file, _matching(file, wanted), wanted.sort)
        rows = list(matching[offset : offset + limit])
        by_row = dict(zip(sorted(rows), rows_at(file, sorted(rows)), strict=True))
        return SamplePage(samples=tuple(by_row[row] for row in rows), total=len(matching))


def open_samples(path: Path) -> Any:
    """The file, to be closed by whoever opened it.

    Raises:
        NotFound: no such file, or one that was cut short by somebody.
    """
    try:
        return pq.ParquetFile(path)
    except FileNotFoundError as exc:
        raise NotFound(f"there are no samples at {path}") from exc
    except pa.ArrowInvalid as exc:
        raise NotFound(f"what lies at {path} is no file of samples: {exc}") from exc


def rows_at(file: Any, rows: Sequence[int]) -> Iterator[SampleView]:
    """The samples of these rows (ascending), reading only the row groups that hold them."""
    start = 0
    for group in range(file.num_row_groups):
        end = start + file.metadata.row_group(group).num_rows
        here = [row - start for row in rows if start <= row < end]
        if here:
            for sample in file.read_row_group(group).take(here).to_pylist():
                yield _view(sample)
        start = end


def _view(row: dict[str, Any]) -> SampleView:
    """A row as written now, or by a version that knew only one sample a prompt."""
    row.setdefault("prompt_index", row["index"])
    row["more"] = dict(row.get("more") or ())
    return SampleView.model_validate(row)


def _row(sample: SampleView) -> dict[str, Any]:
    row = sample.model_dump()
    row["more"] = list(sample.more.items())
    return row


def _write_batches(file: Any, samples: Iterator[SampleView]) -> int:
    count = 0
    with pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        while batch := [_row(sample) for sample in islice(samples, _ROW_GROUP)]:
            writer.write_table(pa.Table.from_pylist(batch, schema=SCHEMA))
            count += len(batch)
    return count


# --- looking for samples


def _matching(file: Any, wanted: Wanted) -> Sequence[int]:
    """The numbers of the rows that match, in order."""
    if not wanted.kinds and not wanted.text:
        return range(file.metadata.num_rows)
    found: list[int] = []
    start = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if _may_match(file, group, wanted.kinds):
            found += [start + row for row in _in_group(file, group, wanted)]
        start += rows
    return found


def _sorted(file: Any, matching: Sequence[int], sort: SampleSort) -> Sequence[int]:
    """The rows in the wanted order; reads one narrow column for it. The file's own order is that of `index`."""
    if sort is SampleSort.INDEX:
        return matching
    if sort is SampleSort.INDEX_DOWN:
        return matching[::-1]
    name = sort.removeprefix("-")
    rows = pa.array(matching, pa.int64())
    table = pa.table({name: file.read(columns=[name])[name].take(rows)})
    order = "descending" if sort.startswith("-") else "ascending"
    return list(rows.take(pc.sort_indices(table, sort_keys=[(name, order)])).to_pylist())


def _in_group(file: Any, group: int, wanted: Wanted) -> list[int]:
    rows = file.metadata.row_group(group).num_rows
    mask = pa.array([not wanted.kinds] * rows) if not wanted.kinds else None
    for kind in wanted.kinds:
        found = pc.fill_null(_of_kind(file, group, kind), False)
        mask = found if mask is None else pc.or_(mask, found)
    if wanted.text and pc.any(mask).as_py():
        texts = file.read_row_group(group, columns=list(_SEARCHED))
        hits = [pc.match_substring(texts[name], wanted.text, ignore_case=True) for name in _SEARCHED]
        anywhere = pc.fill_null(hits[0], False)
        for hit in hits[1:]:
            anywhere = pc.or_(anywhere, pc.fill_null(hit, False))
        mask = pc.and_(mask, anywhere)
    return list(pc.indices_nonzero(mask).to_pylist())


def _of_kind(file: Any, group: int, kind: Which) -> Any:
    """A mask of a group's rows, null for those that can't say."""

    def column(name: str) -> Any:
        return file.read_row_group(group, columns=[name])[name]

    if kind is Which.WRONG:
        return pc.less(column("score"), 1.0)
    if kind is Which.ERRORED:
        return pc.is_valid(column("error"))
    if kind is Which.TRUNCATED:
        return pc.equal(column("finish_reason"), "length")
    if kind is Which.EMPTY:
        blank = pc.equal(pc.utf8_trim_whitespace(column("output")), "")
        return pc.and_(blank, pc.is_valid(column("finish_reason")))
    if "unparsed" in file.schema_arrow.names:
        return column("unparsed")
    return pc.less(column("index"), 0)  # written before there was such a thing: none


def _may_match(file: Any, group: int, kinds: Collection[Which]) -> bool:
    """False where the group's statistics tell that none of it is of these kinds."""
    return not kinds or any(_may_have(file.metadata.row_group(group), kind) for kind in kinds)


def _may_have(group: Any, kind: Which) -> bool:
    column = {Which.WRONG: "score", Which.ERRORED: "error"}.get(kind)
    chunks = (group.column(number) for number in range(group.num_columns))
    told = next((chunk.statistics for chunk in chunks if chunk.path_in_schema == column), None)
    if told is None:
        return True
    if kind is Which.ERRORED:
        return not told.has_null_count or told.null_count < group.num_rows
    return not told.has_min_max or told.min < 1.0
