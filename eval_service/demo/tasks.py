"""What the demo's model learns: put five letters into upper case, reverse them, sort them.

Invariant: a question belongs to the training set or to the held-out one by a hash of its own text, so no question is
ever in both, whatever the sizes and seeds. `check_disjoint` proves it on the files as written.
"""

from __future__ import annotations

import hashlib
import json
import random
import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HELD_OUT_OF = 8  # one question in eight is held out
Example = tuple[str, str]  # question, answer


@dataclass(frozen=True, slots=True)
class DataFiles:
    """What `write_data` wrote: chat messages to train on, and pre-rendered prompts by task to evaluate with."""

    train: Path
    evals: Mapping[str, Path]
    train_examples: int
    eval_examples: int


def _letters(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase[:16], k=5))


def _sort(rng: random.Random) -> Example:
    word = _letters(rng)
    return f"sort {word}", "".join(sorted(word))


def _reverse(rng: random.Random) -> Example:
    word = _letters(rng)
    return f"reverse {word}", word[::-1]


def _upper(rng: random.Random) -> Example:
    word = _letters(rng)
    return f"upper {word}", word.upper()


TASKS: Mapping[str, Callable[[random.Random], Example]] = {
    "upper": _upper,
    "reverse": _reverse,
    "sort": _sort,
}


def is_held_out(question: str) -> bool:
    """Whether a question may only be evaluated with."""
    return hashlib.sha256(question.encode()).digest()[0] % HELD_OUT_OF == 0


def write_data(
    directory: Path,
    render: Callable[[str], str],
    *,
    seed: int,
    train_examples: int,
    eval_examples: int,
) -> DataFiles:
    """Write `train.jsonl` and `eval_<task>.jsonl`.

    Args:
        render: from a question to the prompt as the model sees it: the chat template with its generation prompt.
        train_examples: over all tasks, in equal parts; questions may come again, as far as the task runs short.
        eval_examples: over all tasks, in equal parts, all different.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    train = directory / "train.jsonl"
    _write_lines(train, (_chat(*example) for example in _training(rng, train_examples)))
    evals = {}
    for task in TASKS:
        evals[task] = directory / f"eval_{task}.jsonl"
        held_out = _held_out(task, rng, eval_examples // len(TASKS))
        _write_lines(evals[task], ({"prompt": render(q), "question": q, "answer": a} for q, a in held_out))
    return DataFiles(train, evals, train_examples, eval_examples // len(TASKS) * len(TASKS))


def check_disjoint(files: DataFiles, render: Callable[[str], str]) -> int:
    """Compare the files as written, by rendered prompt, and return how many held-out prompts were looked up.

    Raises:
        ValueError: a held-out prompt is trained on, or stands twice in its file.
    """
    trained = {render(messages["messages"][0]["content"]) for messages in _read_lines(files.train)}
    looked_up = 0
    for task, path in files.evals.items():
        prompts = [line["prompt"] for line in _read_lines(path)]
        if len(set(prompts)) != len(prompts):
            raise ValueError(f"{path.name}: a prompt of {task} stands twice")
        if leaked := trained.intersection(prompts):
            raise ValueError(f"{path.name}: {len(leaked)} prompts are trained on, such as {sorted(leaked)[0]!r}")
        looked_up += len(prompts)
    return looked_up


def _training(rng: random.Random, count: int) -> Iterator[Example]:
    makers = list(TASKS.values())
    made = 0
    while made < count:
        question, answer = makers[made % len(makers)](rng)
        if not is_held_out(question):
            made += 1
            yield question, answer


def _held_out(task: str, rng: random.Random, count: int) -> Iterator[Example]:
    seen: set[str] = set()
    while len(seen) < count:
        question, answer = TASKS[task](rng)
        if is_held_out(question) and question not in seen:
            seen.add(question)
            yield question, answer


def _chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _write_lines(path: Path, lines: Iterator[dict[str, Any]]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        for line in file:
            yield json.loads(line)
