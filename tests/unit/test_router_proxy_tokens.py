"""Token ids out of range are found wherever SGLang's routes take them, and nowhere else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.proxy.tokens import token_fault


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [0, 99]},
        {"input_ids": [[0], [99]], "sampling_params": {"max_new_tokens": 4096, "temperature": 0.5}},
        {"prompt": "12345", "max_tokens": 500, "seed": 12345},
        {"prompt": ["text", "99999"]},
        {"messages": [{"role": "user", "content": "prompt 12345"}], "logit_bias": {"99": -100}},
        {"text": "hi", "priority": 1000, "input": {"text": 5}},
        {},
        [],
    ],
)
def test_what_is_in_range_or_no_token_passes(body: Any) -> None:
    assert token_fault(json.dumps(body).encode(), 100) is None


@pytest.mark.parametrize(
    ("body", "id_"),
    [
        ({"input_ids": [100]}, "100"),
        ({"input_ids": [[1], [-1]]}, "-1"),
        ({"prompt": [[5, 1000]]}, "1000"),
        ({"input": [100]}, "100"),
        ({"tokens": [100]}, "100"),
        ({"token_ids_logprob": [[100]]}, "100"),
        ({"logit_bias": {"100": 1}}, "100"),
        ({"logit_bias": {"x": 1}}, "-1"),
        ({"sampling_params": [{"logit_bias": {"100": 1}, "stop_token_ids": [3]}]}, "100"),
        ({"sampling_params": {"stop_token_ids": [100]}}, "100"),
    ],
)
def test_what_is_out_of_range_is_named(body: Any, id_: str) -> None:
    assert token_fault(json.dumps(body).encode(), 100) == f"token id {id_} is not in 0..99"


def test_it_is_found_however_its_key_is_spelled() -> None:
    assert token_fault(b'{"input\\u005fids": [100]}', 100) is not None


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"input_ids": [1', b"\xff", b"[" * 100_000, b'{"prompt": %b' % (b"[" * 50)]
)
def test_what_cannot_be_read_is_refused(body: bytes) -> None:
    assert "no JSON" in (token_fault(body, 100) or "")


def test_what_is_nested_too_deep_to_be_looked_through_is_refused() -> None:
    assert token_fault(b'{"prompt": ' + b"[" * 50 + b"1" + b"]" * 50 + b"}", 100) is not None
