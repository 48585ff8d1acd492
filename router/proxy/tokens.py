"""Token ids in a request, checked before any engine sees them: one id out of range ends a whole SGLang server.

A target's `vocab_size` says what is in range. A body that can't be read as JSON is refused with it, since what can't
be read can't be checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

# Where SGLang's native and OpenAI routes take token ids.
_OPENAI = ("prompt", "input", "query", "items", "text_1", "text_2", "label_token_ids")
_NATIVE = ("input_ids", "tokens", "token_ids_logprob", "stop_token_ids")
_LISTS = frozenset((*_OPENAI, *_NATIVE))
_KEYS = frozenset(["logit_bias"])
_MAX_DEPTH = 32


def token_fault(body: bytes, vocab_size: int) -> str | None:
    """What is wrong with a body's token ids; None if nothing is."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as exc:
        return f"the body is no JSON: {exc}"
    for id_ in _ids(parsed, inside=False, depth=0):
        if not 0 <= id_ < vocab_size:
            return f"token id {id_} is not in 0..{vocab_size - 1}"
    return None


def _ids(value: Any, *, inside: bool, depth: int) -> Iterator[int]:
    """The integers in it, if it is `inside` something that holds token ids, and those of all such things below it."""
    if depth > _MAX_DEPTH:
        yield -1
    elif isinstance(value, int):
        if inside:
            yield value
    elif isinstance(value, list):
        for item in value:
            yield from _ids(item, inside=inside, depth=depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in _KEYS and isinstance(item, dict):
                yield from (_as_id(id_) for id_ in item)
            else:
                yield from _ids(item, inside=key in _LISTS, depth=depth + 1)


def _as_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        return -1
