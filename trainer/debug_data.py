"""Batches on disk: a run dumps what each step trained on, and another trains on exactly that, to reproduce a fault.

A step is `step_<n>.json`: {"step": n, "examples": [row, ...]}, and a row {"token_ids": [...], "learn": [0 or 1, ...],
"starts": [0, ...]}, as the tokenizer, the packing and the order of the data made them; none of these is asked again.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from eval_service.contract.errors import ConfigError
from trainer.data import Example

FIELD = "data.load_debug_data"


class Batches(Protocol):
    """What a run trains on. `steps_per_epoch` is None where there are no epochs."""

    @property
    def steps_per_epoch(self) -> int | None: ...

    @property
    def identity(self) -> dict[str, int]:
        """What decides which rows a step trains on."""

    def of_step(self, step: int) -> list[Example]: ...


def path_of(directory: Path, step: int) -> Path:
    """Where a step's batch lies."""
    return directory / f"step_{step}.json"


@dataclass(slots=True)
class Dumping:
    """Another's batches, each dumped when it is first used. One that can't be written is told, and training goes on."""

    batches: Batches
    directory: Path
    dumped: int | None = field(default=None, init=False)

    @property
    def steps_per_epoch(self) -> int | None:
        """As the batches have it."""
        return self.batches.steps_per_epoch

    @property
    def identity(self) -> dict[str, int]:
        """As the batches have it."""
        return self.batches.identity

    def of_step(self, step: int) -> list[Example]:
        """What step `step` trains on."""
        examples = self.batches.of_step(step)
        if self.dumped != step:
            self.dumped = step
            try:
                _write(self.directory, step, examples)
            except OSError as exc:
                print(f"data.save_debug_data: step {step} was not dumped: {exc}", file=sys.stderr, flush=True)
        return examples


@dataclass(frozen=True, slots=True)
class Dumped:
    """Batches that were dumped, for the steps `first` to `last`; all are read and checked at once."""

    steps: dict[int, list[Example]]

    @property
    def steps_per_epoch(self) -> int | None:
        """What was dumped has no epochs."""
        return None

    @property
    def identity(self) -> dict[str, int]:
        """The steps that are there: they are trained on whatever a checkpoint remembers of its data."""
        return {"dumped_from": min(self.steps), "dumped_to": max(self.steps)}

    def of_step(self, step: int) -> list[Example]:
        """What step `step` trains on."""
        return self.steps[step]


def load_dumped(directory: Path, first: int, last: int, *, global_batch_size: int, vocab_size: int) -> Dumped:
    """Read the batches of the steps `first` to `last`.

    Raises:
        ConfigError: one is not there, is no batch, or is one of another model or batch size.
    """
    return Dumped({step: _read(directory, step, global_batch_size, vocab_size) for step in range(first, last + 1)})


def _read(directory: Path, step: int, size: int, vocab_size: int) -> list[Example]:
    path = path_of(directory, step)
    try:
        table = json.loads(path.read_text())
        examples = [_example(row) for row in table["examples"]]
    except OSError as exc:
        hint = f"dump it with data.save_debug_data, or let train.num_steps end before step {step}"
        raise ConfigError(f"{path} can't be read: {exc.strerror}", field=FIELD, hint=hint) from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"{path} is no dumped batch: {exc!r}", field=FIELD, hint="dump it again") from exc
    if len(examples) != size:
        raise ConfigError(
            f"{path} holds {len(examples)} conversations", field=FIELD, hint=f"train.global_batch_size is {size}"
        )
    if any(not 0 <= token < vocab_size for example in examples for token in example.token_ids):
        hint = f"the model's vocabulary ends before {vocab_size}; take the model that it was dumped with"
        raise ConfigError(f"{path} holds token ids that the model doesn't have", field=FIELD, hint=hint)
    if not all(map(_is_row, examples)):
        raise ConfigError(
            f"{path} is no dumped batch: tokens, marks and starts differ", field=FIELD, hint="dump it again"
        )
    return examples


def _is_row(example: Example) -> bool:
    size = len(example.token_ids)
    begins = example.starts
    ascend = begins[:1] == (0,) and all(before < after for before, after in pairwise((*begins, size)))
    return size >= 2 and size == len(example.learn) and ascend


def _example(row: dict[str, Any]) -> Example:
    ids, learn = tuple(map(int, row["token_ids"])), tuple(map(bool, row["learn"]))
    return Example(ids, learn, tuple(map(int, row.get("starts", (0,)))))


def _write(directory: Path, step: int, examples: list[Example]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    rows = [
        {"token_ids": list(e.token_ids), "learn": [int(mark) for mark in e.learn], "starts": list(e.starts)}
        for e in examples
    ]
    partial = directory / f".step_{step}.{os.getpid()}"
    partial.write_text(json.dumps({"step": step, "examples": rows}))
    partial.replace(path_of(directory, step))
