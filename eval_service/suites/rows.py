"""Rows of datasets as they lie on disk: JSONL, Parquet, or a directory that `datasets` saved.

What is checked and what is digested are the same bytes. Only data is read: a loading script is never run, and nothing
is unpickled. Every fault is a ConfigError that names the file and the row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from eval_service.contract.errors import ConfigError
from eval_service.suites.sources import Source

JSONL, PARQUET = (".jsonl", ".ndjson", ".json"), (".parquet", ".pq")


@dataclass(frozen=True, slots=True)
class Row:
    """One row: where it is (`line 3`, `row 3`), and its columns."""

    place: str
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """A whole table, the digest of its bytes, and the files that they are in."""

    path: Path
    digest: str
    rows: tuple[Row, ...]
    sources: tuple[Source, ...]


def read_rows(path: Path, *, split: str | None = None, columns: frozenset[str] = frozenset()) -> Rows:
    """Read all rows; of a table with columns of its own, only those named are kept.

    Raises:
        ConfigError: it can't be read, is empty, or is none of the formats.
    """
    try:
        if path.is_dir():
            found = _saved(path, split, columns)
        elif split is not None:
            raise ConfigError(f"{path} is a file, which has no splits", field="split", hint="leave it out")
        else:
            source, data = Source.read(path)
            read = _parquet if path.suffix in PARQUET else _jsonl
            found = Rows(path, source.digest, tuple(read(path, data, columns)), (source,))
    except OSError as exc:
        raise ConfigError(f"it can't be read: {exc}", field="path") from exc
    if not found.rows:
        raise ConfigError(f"it is empty: {path}", field="path", hint="one row a question")
    return found


def fault(path: Path, row: Row, message: str, hint: str | None = None) -> ConfigError:
    """What is wrong with a row."""
    return ConfigError(f"{path}, {row.place}: {message}", hint=hint)


def _jsonl(path: Path, data: bytes, _: frozenset[str]) -> Iterator[Row]:
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        place = Row(f"line {number}", {})
        try:
            columns = json.loads(line)
        except (ValueError, RecursionError) as exc:  # UnicodeDecodeError is one too
            raise fault(path, place, f"not JSON: {exc}") from exc
        if not isinstance(columns, dict):
            raise fault(path, place, "not a JSON object", hint="one object with the dataset's columns a line")
        yield Row(place.place, columns)


def _parquet(path: Path, data: bytes, columns: frozenset[str]) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        present = [name for name in file.schema_arrow.names if name in columns]
        yield from _numbered(file.iter_batches(columns=present))
    except pa.ArrowException as exc:
        raise ConfigError(f"{path} is no Parquet file: {exc}", field="path") from exc


def _saved(path: Path, split: str | None, columns: frozenset[str]) -> Rows:
    """What `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    import pyarrow as pa

    directory = _split_of(path, split)
    state = _json(directory / "state.json")
    names = [str(entry.get("filename")) for entry in state.get("_data_files", ()) if isinstance(entry, dict)]
    if not names or any(Path(name).name != name for name in names):
        raise ConfigError(f"{directory / 'state.json'} names no data files", field="path")
    if state.get("_indices_data_files"):
        raise ConfigError(f"{directory} holds indices into its rows", field="path", hint="flatten_indices() first")
    hashed = xxhash.xxh3_128()
    rows: list[Row] = []
    sources: list[Source] = []
    for name in names:
        source, data = Source.read(directory / name)
        sources.append(source)
        hashed.update(data)
        try:
            with pa.ipc.open_stream(data) as reader:
                present = [column for column in reader.schema.names if column in columns]
                batches = (batch.select(present) for batch in reader)
                rows += _numbered(batches, len(rows))
        except pa.ArrowException as exc:
            raise ConfigError(f"{directory / name} is no Arrow stream: {exc}", field="path") from exc
    return Rows(directory, hashed.hexdigest(), tuple(rows), tuple(sources))


def _split_of(path: Path, split: str | None) -> Path:
    """The directory of one split.

    Raises:
        ConfigError: there are several and none is named, or it is not among them.
    """
    if not (path / "dataset_dict.json").is_file():
        if split is not None:
            raise ConfigError(f"{path} has no splits", field="split", hint="leave it out")
        if not (path / "state.json").is_file():
            hint = "write it with Dataset.save_to_disk; a loading script is never run"
            raise ConfigError(f"{path} is no saved dataset: it has no state.json", field="path", hint=hint)
        return path
    splits = _json(path / "dataset_dict.json").get("splits")
    names = [str(name) for name in splits] if isinstance(splits, list) else []
    if split is None or split not in names or Path(split).name != split:
        asked = "no split is named" if split is None else f"there is no split {split!r}"
        raise ConfigError(f"{path}: {asked}", field="split", hint=f"there are {', '.join(names)}")
    return path / split


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as exc:
        raise ConfigError(f"{path} is no JSON: {exc}", field="path") from exc
    return found if isinstance(found, dict) else {}


def _numbered(batches: Any, start: int = 0) -> Iterator[Row]:
    """Rows from 1."""
    number = start
    for batch in batches:
        for columns in batch.to_pylist() if batch.num_columns else [{}] * batch.num_rows:
            number += 1
            yield Row(f"row {number}", columns)
