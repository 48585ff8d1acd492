"""Chat messages to token batches: loss on the assistant's tokens alone, the EOS that ends each turn included.

Invariant: which conversations a step trains on, and how they are packed, depends on the seed and the step alone, so a
resumed run needs no more than its step to go on with the right ones.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Protocol

import torch

from eval_service.contract.errors import ConfigError

FIELD = "data.train"
_OPEN_ROWS = 64
_ROLES = frozenset({"system", "user", "assistant", "tool"})


class ChatTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    eos_token_id: int | None
    eos_token: str | None

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def __call__(self, text: str, **options: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation, or several that share a row: `learn[i]` says whether token i is one that the model must come to
    emit, `starts` where each conversation begins."""

    token_ids: tuple[int, ...]
    learn: tuple[bool, ...]
    starts: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Batch:
    """[b, s] each; `labels[i, j]` follows `token_ids[i, j]`, and `loss_mask` is 1.0 where it counts. Positions begin
    anew with each conversation; `documents` says which of its row's a token is of, None: no row has more than one."""

    token_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    documents: torch.Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        parts = (self.token_ids, self.labels, self.loss_mask, self.position_ids)
        tokens, labels, mask, positions = (part.to(device, non_blocking=True) for part in parts)
        documents = self.documents.to(device, non_blocking=True) if self.documents is not None else None
        return Batch(tokens, labels, mask, positions, documents)

    def visible(self) -> torch.Tensor | None:
        """[b, 1, s, s], whether token i may see token j: those before it in its own conversation. None: all before."""
        if self.documents is None:
            return None
        same = self.documents[:, :, None] == self.documents[:, None, :]
        return same.tril()[:, None]


@dataclass(frozen=True, slots=True)
class Dataset:
    """Rows in a seeded order: every epoch is a new permutation, and its incomplete last batch is left out."""

    examples: Sequence[Example]
    seed: int
    global_batch_size: int

    @property
    def identity(self) -> dict[str, int]:
        """What decides which rows a step trains on; a checkpoint remembers it."""
        return {
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            "rows": len(self.examples),
            "conversations": sum(len(example.starts) for example in self.examples),
        }

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every row was seen once, but for those of an incomplete batch."""
        return len(self.examples) // self.global_batch_size

    def of_step(self, step: int) -> list[Example]:
        """What step `step` (from 1) trains on."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        order = _order(self.seed, epoch, len(self.examples))
        first = place * self.global_batch_size
        return [self.examples[index] for index in order[first : first + self.global_batch_size]]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def load_dataset(
    path: Path,
    tokenizer: ChatTokenizer,
    *,
    max_length: int,
    seed: int,
    global_batch_size: int,
    packing: bool = False,
) -> Dataset:
    """Read and tokenize a JSON-lines file; with `packing`, conversations share rows of up to `max_length` tokens.

    Raises:
        ConfigError: names the line that is wrong, or says that there are too few conversations.
    """
    examples = [example for example in _examples(path, tokenizer, max_length) if any(example.learn)]
    if packing:
        examples = pack(examples, max_length, seed)
    if len(examples) < global_batch_size:
        what = "rows of conversations" if packing else "conversations"
        raise ConfigError(
            f"{path.name} has {len(examples)} {what} with something to learn, fewer than a batch",
            field=FIELD,
            hint=f"lower train.global_batch_size ({global_batch_size}), or give more data",
        )
    return Dataset(examples, seed, global_batch_size)


def pack(examples: Sequence[Example], max_length: int, seed: int) -> list[Example]:
    """Put conversations, in a seeded order, into rows of up to `max_length` tokens: each into the fullest open row that
    has room for it, of the last few. The rows are the same for every epoch, which orders them anew."""
    order = list(examples)
    random.Random(f"{seed}/pack").shuffle(order)
    rows: list[list[Example]] = []
    spare: list[int] = []
    for example in order:
        size = len(example.token_ids)
        open_rows = range(max(0, len(rows) - _OPEN_ROWS), len(rows))
        fitting = [row for row in open_rows if spare[row] >= size]
        if fitting:
            row = min(fitting, key=spare.__getitem__)
        else:
            row = len(rows)
            rows.append([])
            spare.append(max_length)
        rows[row].append(example)
        spare[row] -= size
    return [_joined(row) for row in rows]


def _joined(row: Sequence[Example]) -> Example:
    starts = tuple(accumulate((len(example.token_ids) for example in row[:-1]), initial=0))
    ids = chain.from_iterable(example.token_ids for example in row)
    # A conversation's first token follows nothing, so nothing can learn to emit it.
    learn = chain.from_iterable((False, *example.learn[1:]) for example in row)
    return Example(tuple(ids), tuple(learn), starts)


def encode(messages: Sequence[dict[str, str]], tokenizer: ChatTokenizer, max_length: int) -> Example:
    """Render a conversation with the tokenizer's own template, and mark what the assistant said.

    Raises:
        ValueError: the template renders a conversation's beginning otherwise than the whole.
    """
    text = _render(tokenizer, messages)
    spans = list(_assistant_spans(messages, tokenizer, text))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = list(encoded["input_ids"])
    learn = [
        any(begin <= left and right <= end for begin, end in spans) and right > left
        for left, right in encoded["offset_mapping"]
    ]
    if messages[-1]["role"] == "assistant" and tokenizer.eos_token_id not in _last_run(ids, learn):
        last = max((index for index, mark in enumerate(learn) if mark), default=len(ids) - 1)
        ids, learn = [*ids[: last + 1], _eos(tokenizer)], [*learn[: last + 1], True]
    return Example(tuple(ids[:max_length]), tuple(learn[:max_length]))


def collate(examples: Sequence[Example], *, length: int | None = None) -> Batch:
    """Pad on the right to the longest, or to `length` tokens of input; what follows a conversation is never attended
    to by it, nor counted; neither is what is before it in its row."""
    length = 1 + length if length is not None else max(len(example.token_ids) for example in examples)
    ids = torch.zeros((len(examples), length), dtype=torch.long)
    learn = torch.zeros((len(examples), length))
    for row, example in enumerate(examples):
        ids[row, : len(example.token_ids)] = torch.tensor(example.token_ids)
        learn[row, : len(example.learn)] = torch.tensor(example.learn, dtype=torch.float32)
    tokens = ids[:, :-1].contiguous()
    positions = torch.arange(length - 1).expand_as(tokens)
    documents = None
    if any(len(example.starts) > 1 for example in examples):
        positions, documents = _documents(examples, positions)
    return Batch(tokens, ids[:, 1:].contiguous(), learn[:, 1:].contiguous(), positions, documents)


def _documents(examples: Sequence[Example], plain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and conversation of each token; a row's padding is one more conversation."""
    begins = torch.zeros_like(plain, dtype=torch.long)
    for row, example in enumerate(examples):
        starts = [*example.starts[1:], len(example.token_ids)]
        begins[row, [start for start in starts if start < plain.shape[1]]] = 1
    first = torch.where(begins.bool(), plain, 0).cummax(dim=1).values
    return plain - first, begins.cumsum(dim=1)


def _examples(path: Path, tokenizer: ChatTokenizer, max_length: int) -> Iterator[Example]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} can't be read: {exc}", field=FIELD, hint="name a JSON-lines file") from exc
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield encode(_messages(line), tokenizer, max_length)
            except ValueError as exc:
                hint = 'a line is {"messages": [{"role": "user", "content": "..."}, ...]}'
                raise ConfigError(f"{path.name} line {number}: {exc}", field=FIELD, hint=hint) from exc


def _messages(line: str) -> list[dict[str, str]]:
    table = json.loads(line)
    messages = table.get("messages") if isinstance(table, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError("no messages")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise ValueError(f"a message's role must be one of {', '.join(sorted(_ROLES))}")
        if not isinstance(message.get("content"), str):
            raise ValueError("a message's content must be a string")
    return messages


def _render(tokenizer: ChatTokenizer, messages: Sequence[dict[str, str]], *, asks: bool = False) -> str:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=asks)
    if not isinstance(text, str):
        raise ValueError("the chat template rendered no text")
    return text


def _assistant_spans(
    messages: Sequence[dict[str, str]], tokenizer: ChatTokenizer, text: str
) -> Iterator[tuple[int, int]]:
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:index], asks=True)
        through = _render(tokenizer, messages[: index + 1]) if index + 1 < len(messages) else text
        if not (through.startswith(before) and text.startswith(through)):
            raise ValueError("the chat template renders a conversation's beginning otherwise than the whole")
        end = len(through)
        # What a template puts after the EOS (a line break, say) is never generated, so it is not learnt.
        after_eos = through.rfind(tokenizer.eos_token, len(before)) if tokenizer.eos_token else -1
        if after_eos >= 0 and tokenizer.eos_token:
            end = after_eos + len(tokenizer.eos_token)
        yield len(before), end


def _last_run(ids: Sequence[int], learn: Sequence[bool]) -> list[int]:
    last = max((index for index, mark in enumerate(learn) if mark), default=-1)
    return [ids[last]] if last >= 0 else []


def _eos(tokenizer: ChatTokenizer) -> int:
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no EOS, and the model could never learn to stop")
    return tokenizer.eos_token_id
