"""What the fake engine makes of the bytes that it loads: everything that it says follows from their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval_service.contract.manifest import Canary, tensors_digest
from eval_service.contract.safetensors_io import describe_file

ANSWERS = "fake_answers.json"


@dataclass(frozen=True, slots=True)
class Weights:
    """What was read of a model's directory."""

    tensor_digest: str
    answers: dict[str, str]


def fake_logprobs(tensor_digest: str, token_ids: Sequence[int]) -> tuple[float, ...]:
    """The log-probs that a fake holding those tensors gives for a sequence; one shorter than it."""
    result = []
    for at in range(1, len(token_ids)):
        seed = f"{tensor_digest}:{','.join(map(str, token_ids[: at + 1]))}"
        fraction = int.from_bytes(hashlib.blake2s(seed.encode(), digest_size=6).digest(), "big") / (1 << 48)
        result.append(-0.1 - 9.0 * fraction)
    return tuple(result)


def fake_canary(tensor_digest: str, rows: Sequence[Sequence[int]]) -> Canary:
    """The right canary for a fake that holds those tensors."""
    return Canary(
        dtype="float32",
        token_ids=tuple(tuple(row) for row in rows),
        logprobs=tuple(fake_logprobs(tensor_digest, row) for row in rows),
    )


def fake_text(tensor_digest: str, prompt: str | list[int]) -> str:
    """What a fake holding those tensors answers to a prompt that its `fake_answers.json` has not."""
    return hashlib.blake2s(f"{tensor_digest}:{prompt}".encode(), digest_size=4).hexdigest()


def read_weights(directory: Path) -> Weights:
    """Read and hash what SGLang would load.

    Raises:
        FileNotFoundError: no such directory, or no safetensors file in it.
        SnapshotFault: one is not sound; real SGLang dies of it.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"Cannot find any model weights with `{directory}`")
    digest = tensors_digest([entry for file in files for entry in describe_file(file)[1]])
    answers = directory / ANSWERS
    return Weights(digest, json.loads(answers.read_text()) if answers.exists() else {})


def ends_sglang(directory: Path, *, vocab_size: int, hidden_size: int) -> bool:
    """Whether an embedding or a norm has another shape than the model that runs: SGLang dies of it.

    Of a linear weight's wrong shape, a missing tensor or one too many it does not: those load, wrongly.
    """
    if not hidden_size:
        return False
    for file in sorted(directory.glob("*.safetensors")):
        for entry in describe_file(file)[1]:
            if entry.name.endswith("norm.weight") and entry.name.count("layers") == 0 and entry.shape != (hidden_size,):
                return True
            if entry.name.endswith("embed_tokens.weight") and entry.shape != (vocab_size, hidden_size):
                return True
    return False
