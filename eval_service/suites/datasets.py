"""Datasets as questions: columns by key, few-shot examples, and `limit`. Every fault is a ConfigError that names the
file, the row and the column.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from eval_service.contract.errors import ConfigError
from eval_service.suites.config import DatasetConfig, FewshotConfig, SuiteConfig
from eval_service.suites.rows import Row, Rows, fault, read_rows
from eval_service.suites.sources import Source

Messages = tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question. `index` runs over the whole suite; `ids`, where given, are sent in the text's place.

    `messages` are still to be rendered with the snapshot's template, which makes text and ids of them; of `choices`
    the likeliest is asked for. `error` is why it can't be asked.
    """

    index: int
    dataset: str
    text: str
    answer: str
    ids: tuple[int, ...] | None = None
    messages: Messages = ()
    choices: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset as read: its rows after `limit`, the digest of all bytes that they come from, and their files."""

    config: DatasetConfig
    digest: str
    rows: tuple[Prompt, ...]
    sources: tuple[Source, ...]


def read_dataset(config: DatasetConfig, suite: SuiteConfig, base: Path, first_index: int) -> Dataset:
    """Read and check a whole dataset, rows that `limit` leaves out as well.

    Raises:
        ConfigError: no such file, an empty one, or a row that isn't what the columns say.
    """
    reader = _Reader(config, suite)
    table = reader.read(base / config.path, config.split)
    questions = reader.questions(table)
    digest, sources = table.digest, table.sources
    chosen = _drawn(config, len(questions))
    if config.fewshot is not None:
        examples, more = _examples(config.fewshot, reader, base, questions)
        if more is not None:
            sources += more.sources
        digest = xxhash.xxh3_128_hexdigest(f"{digest}{more.digest if more is not None else ''}".encode())
        solved = [_shot(config.fewshot, questions[i], i, examples) for i in chosen]
    else:
        solved = [questions[i] for i in chosen]
    rows = tuple(replace(prompt, index=first_index + i) for i, prompt in enumerate(solved))
    return Dataset(config, digest, rows, sources)


def _drawn(config: DatasetConfig, count: int) -> Sequence[int]:
    """`limit` rows, drawn with the seed, in the file's order."""
    if config.limit is None or config.limit >= count:
        return range(count)
    return sorted(random.Random(config.seed).sample(range(count), config.limit))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Makes questions of rows."""

    config: DatasetConfig
    suite: SuiteConfig

    def read(self, path: Path, split: str | None) -> Rows:
        """The rows of a file or directory, named by the dataset."""
        config = self.config
        wanted = {config.prompt, config.answer, config.choices, *([config.prompt_ids] if config.prompt_ids else [])}
        try:
            return read_rows(path, split=split, columns=frozenset(wanted))
        except ConfigError as exc:
            raise ConfigError(f"dataset {config.name!r}: {exc.message}", field=exc.field, hint=exc.hint) from exc

    def questions(self, table: Rows) -> list[Prompt]:
        """All of them, whose indices do not count yet."""
        return [self._question(table.path, row) for row in table.rows]

    def _question(self, path: Path, row: Row) -> Prompt:
        config = self.config
        if self.suite.chooses:
            choices = _choices(config.choices, path, row)
            answer = choices[_right(config.answer, path, row, choices)]
            return Prompt(0, config.name, _text(config.prompt, path, row), answer, choices=choices)
        answer = ""
        if self.suite.scorer.needs_answer or config.answer in row.columns:
            answer = _text(config.answer, path, row)
        if config.prompt_ids is not None:
            text = _text(config.prompt, path, row) if config.prompt in row.columns else ""
            return Prompt(0, config.name, text, answer, _ids(config.prompt_ids, path, row))
        if self.suite.prompt_format == "chat":
            return Prompt(0, config.name, "", answer, messages=_messages(config.prompt, path, row))
        return Prompt(0, config.name, _text(config.prompt, path, row), answer)


# --- few-shot


def _examples(
    config: FewshotConfig, reader: _Reader, base: Path, questions: list[Prompt]
) -> tuple[list[Prompt], Rows | None]:
    """What examples are drawn from, and its table, if that is another one than the dataset's.

    Raises:
        ConfigError: there are fewer than are asked for.
    """
    table, pool = None, questions
    if config.path is not None or config.split is not None:
        path = config.path if config.path is not None else reader.config.path
        try:
            table = reader.read(base / path, config.split)
        except ConfigError as exc:
            raise ConfigError(exc.message, field=f"fewshot.{exc.field}" if exc.field else None, hint=exc.hint) from exc
        pool = reader.questions(table)
    if len(pool) <= config.n:  # one of them may be the question itself
        raise ConfigError(f"there are {len(pool)} rows to draw {config.n} examples from", field="fewshot.n")
    return pool, table


def _shot(config: FewshotConfig, asked: Prompt, row: int, pool: list[Prompt]) -> Prompt:
    """The question with its examples before it; no row that asks the same is among these.

    Raises:
        ConfigError: too few others are left.
    """
    chance = random.Random(f"{config.seed}:{row}")
    chosen: list[Prompt] = []
    seen: set[int] = set()
    while len(seen) < len(pool):
        number = chance.randrange(len(pool))
        if number in seen:
            continue
        seen.add(number)
        example = pool[number]
        if (example.text, example.messages) != (asked.text, asked.messages) and example not in chosen:
            chosen.append(example)
        if len(chosen) == config.n:
            return _with_examples(config, asked, chosen)
    raise ConfigError(f"there are not {config.n} rows that ask something else than row {row + 1}", field="fewshot.n")


def _with_examples(config: FewshotConfig, asked: Prompt, examples: list[Prompt]) -> Prompt:
    if asked.messages:
        opening = asked.messages[:1] if asked.messages[0]["role"] == "system" else ()
        solved = [
            turn
            for example in examples
            for turn in (*_without_system(example.messages), {"role": "assistant", "content": example.answer})
        ]
        return replace(asked, messages=(*opening, *solved, *_without_system(asked.messages)))
    before = "".join(f"{example.text}{config.between}{example.answer}{config.separator}" for example in examples)
    return replace(asked, text=before + asked.text)


def _without_system(messages: Messages) -> Messages:
    return messages[1:] if messages[0]["role"] == "system" else messages


# --- columns


def _column(key: str, path: Path, row: Row) -> Any:
    if key not in row.columns:
        raise fault(path, row, f"no column {key!r}", hint=f"it has {', '.join(sorted(row.columns)) or 'none'}")
    return row.columns[key]


def _text(key: str, path: Path, row: Row) -> str:
    value = _column(key, path, row)
    if _is_chat(value):
        hint = 'set prompt_format = "chat", and the snapshot\'s own chat template is applied; or apply one first'
        raise fault(path, row, f"column {key!r} holds chat messages, and the suite's prompts are rendered", hint)
    if not isinstance(value, str):
        raise fault(path, row, f"column {key!r} holds {type(value).__name__}", hint="make it a string")
    _check_text(value, key, path, row)
    return value


def _check_text(value: str, key: str, path: Path, row: Row) -> None:
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise fault(path, row, f"column {key!r} holds half a surrogate pair", hint="it is no text in any encoding")


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(turn, dict) and "role" in turn for turn in value)


def _messages(key: str, path: Path, row: Row) -> Messages:
    value = _column(key, path, row)
    if isinstance(value, str):
        hint = 'make it [{"role": "user", "content": ...}], or leave prompt_format out if the prompts are rendered'
        raise fault(path, row, f"column {key!r} holds a text, and the suite asks chat messages", hint)
    if not _is_chat(value):
        raise fault(path, row, f"column {key!r} holds no chat messages", hint="a list of {role, content}")
    for turn in value:
        if not isinstance(turn["role"], str) or not isinstance(turn.get("content"), str):
            raise fault(path, row, f"column {key!r} holds a message without a text as content")
        _check_text(turn["content"], key, path, row)
    if value[-1]["role"] == "assistant":
        raise fault(path, row, f"column {key!r} ends in an answer", hint="end it in the user's message")
    return tuple(json.loads(json.dumps(turn, default=str)) for turn in value)


def _choices(key: str, path: Path, row: Row) -> tuple[str, ...]:
    value = _column(key, path, row)
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(item, str) and item for item in value):
        raise fault(path, row, f"column {key!r} holds no list of choices", hint="make it a list of two texts or more")
    for item in value:
        _check_text(item, key, path, row)
    if len(set(value)) < len(value):
        raise fault(path, row, f"column {key!r} holds the same choice twice")
    return tuple(value)


def _right(key: str, path: Path, row: Row, choices: tuple[str, ...]) -> int:
    """Which of the choices is right: told by its number from 0, or its text."""
    value = _column(key, path, row)
    if type(value) is int and 0 <= value < len(choices):
        return value
    if isinstance(value, str) and value in choices:
        return choices.index(value)
    hint = f"make it a number from 0 to {len(choices) - 1}, or the text of one of them"
    raise fault(path, row, f"column {key!r} is none of the choices: {str(value)[:80]!r}", hint)


def _ids(key: str, path: Path, row: Row) -> tuple[int, ...]:
    value = _column(key, path, row)
    if not isinstance(value, list) or not value or not all(type(item) is int for item in value):
        raise fault(path, row, f"column {key!r} is no list of token ids", hint="make it a list of integers")
    return tuple(value)
