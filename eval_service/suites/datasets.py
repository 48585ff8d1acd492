"""Datasets on disk: JSONL, one object a line. Every fault is a ConfigError that names the file, line and column."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from eval_service.contract.errors import ConfigError
from eval_service.suites.config import DatasetConfig


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question. `index` runs over the whole suite; `ids`, where given, are sent in the text's place."""

    index: int
    dataset: str
    text: str
    answer: str
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset as read: its rows after `limit`, and the digest of the file's bytes."""

    config: DatasetConfig
    digest: str
    rows: tuple[Prompt, ...]


def read_dataset(config: DatasetConfig, base: Path, first_index: int) -> Dataset:
    """Read and check a whole file; what is checked and what is digested are the same bytes.

    Raises:
        ConfigError: no such file, an empty one, or a line that isn't what the columns say.
    """
    path = base / config.path
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"dataset {config.name!r} can't be read: {exc}", field="path") from exc
    rows = list(_rows(config, path, data))
    if not rows:
        raise ConfigError(f"dataset {config.name!r} is empty: {path}", field="path", hint="one JSON object a line")
    prompts = tuple(_prompt(config, path, row, first_index + i) for i, row in enumerate(_drawn(config, rows)))
    return Dataset(config, xxhash.xxh3_128_hexdigest(data), prompts)


_Row = tuple[int, dict[str, Any]]  # line number, columns


def _rows(config: DatasetConfig, path: Path, data: bytes) -> Iterator[_Row]:
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as exc:  # UnicodeDecodeError is one too
            raise _fault(path, number, f"not JSON: {exc}") from exc
        if not isinstance(row, dict):
            raise _fault(path, number, "not a JSON object", hint="one object with the dataset's columns a line")
        _prompt(config, path, (number, row), 0)  # a row that `limit` leaves out is checked as well
        yield number, row


def _drawn(config: DatasetConfig, rows: list[_Row]) -> list[_Row]:
    """`limit` rows, drawn with the seed, in the file's order."""
    if config.limit is None or config.limit >= len(rows):
        return rows
    chosen = random.Random(config.seed).sample(range(len(rows)), config.limit)
    return [rows[i] for i in sorted(chosen)]


def _prompt(config: DatasetConfig, path: Path, row: _Row, index: int) -> Prompt:
    answer = _text(config.answer, path, row)
    if config.prompt_ids is None:
        return Prompt(index, config.name, _text(config.prompt, path, row), answer)
    text = _text(config.prompt, path, row) if config.prompt in row[1] else ""
    return Prompt(index, config.name, text, answer, _ids(config.prompt_ids, path, row))


def _column(key: str, path: Path, row: _Row) -> Any:
    number, columns = row
    if key not in columns:
        raise _fault(path, number, f"no column {key!r}", hint=f"it has {', '.join(sorted(columns)) or 'none'}")
    return columns[key]


def _text(key: str, path: Path, row: _Row) -> str:
    value = _column(key, path, row)
    if _is_chat(value):
        hint = "apply the model's chat template first, with its generation prompt: prompts are sent as they stand"
        raise _fault(path, row[0], f"column {key!r} holds chat messages, and the suite's prompts are rendered", hint)
    if not isinstance(value, str):
        raise _fault(path, row[0], f"column {key!r} holds {type(value).__name__}", hint="make it a string")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise _fault(path, row[0], f"column {key!r} holds half a surrogate pair", hint="it is no text in any encoding")
    return value


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(turn, dict) and "role" in turn for turn in value)


def _ids(key: str, path: Path, row: _Row) -> tuple[int, ...]:
    value = _column(key, path, row)
    if not isinstance(value, list) or not value or not all(type(item) is int for item in value):
        raise _fault(path, row[0], f"column {key!r} is no list of token ids", hint="make it a list of integers")
    return tuple(value)


def _fault(path: Path, number: int, message: str, hint: str | None = None) -> ConfigError:
    return ConfigError(f"{path}, line {number}: {message}", hint=hint)
