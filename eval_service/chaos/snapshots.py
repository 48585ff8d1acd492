"""Tiny snapshots of numpy alone: sound ones, bad ones that admission must refuse, and poisoned ones.

What a snapshot answers is in its own bytes, so that a sample made with other weights is told from a right one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from eval_service.admission.architectures import HfConfig, expected_shapes
from eval_service.contract.canary import canary_token_ids
from eval_service.contract.manifest import Canary
from eval_service.contract.safetensors_io import TensorData, write_safetensors
from eval_service.engine.fake import ANSWERS, fake_canary

VOCAB = 128
_SHARDS = 2


def tiny_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a model with 2 layers of width 16."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "eos_token_id": 1,
    }
    return {**config, **changes}


def tiny_texts(vocab_size: int) -> dict[str, bytes]:
    """The files of its tokenizer and its generation config."""
    vocab = {f"t{number}": number for number in range(vocab_size)}
    return {
        "generation_config.json": json.dumps({"eos_token_id": [1]}).encode(),
        "tokenizer.json": json.dumps({"model": {"type": "WordLevel", "vocab": vocab}, "added_tokens": []}).encode(),
        "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}).encode(),
    }


def deal_out(tensors: Sequence[TensorData], count: int) -> Iterator[tuple[str, list[TensorData]]]:
    """The tensors dealt out over `count` files, by name."""
    if count == 1:
        yield "model.safetensors", list(tensors)
        return
    for number in range(count):
        yield f"model-{number + 1:05d}-of-{count:05d}.safetensors", list(tensors[number::count])


class Flaw(StrEnum):
    """What is wrong with a snapshot."""

    NOT_FINITE = "not_finite"
    TENSOR_MISSING = "tensor_missing"
    WRONG_SHAPE = "wrong_shape"
    FLIPPED_BYTE = "flipped_byte"  # after it was hashed
    POISONED = "poisoned"  # its canary is of other weights


BAD = (Flaw.NOT_FINITE, Flaw.TENSOR_MISSING, Flaw.WRONG_SHAPE, Flaw.FLIPPED_BYTE)


@dataclass(frozen=True, slots=True)
class Model:
    """A model before it is written."""

    tensors: tuple[TensorData, ...]
    answers: dict[str, str]

    def shards(self) -> Iterator[tuple[str, list[TensorData]]]:
        """The tensors dealt out over files."""
        yield from deal_out(self.tensors, _SHARDS)

    def files(self) -> dict[str, bytes]:
        """All that is no weights."""
        answers = json.dumps(self.answers).encode()
        return {"config.json": json.dumps(tiny_config()).encode(), **tiny_texts(VOCAB), ANSWERS: answers}


def make_model(seed: str, prompts: dict[str, str], *, flaw: Flaw | None = None) -> Model:
    """A model whose weights, and whose share of right answers, are the seed's.

    Args:
        prompts: every prompt with its right answer.
    """
    rng = random.Random(seed)
    known = rng.sample(sorted(prompts), rng.randint(0, len(prompts)))
    tensors = list(_tensors(rng.getrandbits(64)))
    return Model(tuple(_flawed(tensors, flaw)), {prompt: prompts[prompt] for prompt in known})


def canary_of(tensor_digest: str, flaw: Flaw | None) -> Canary:
    """The canary that a trainer would find, or one of other weights."""
    held = "other weights" if flaw is Flaw.POISONED else tensor_digest
    return fake_canary(held, canary_token_ids(VOCAB, rows=2, length=8))


def flip_byte(directory: Path) -> None:
    """Damage a published file behind its manifest's back."""
    path = sorted(directory.glob("*.safetensors"))[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x10
    path.write_bytes(bytes(data))


def write_base(directory: Path) -> None:
    """The model that the engines boot with."""
    directory.mkdir(parents=True)
    model = make_model("base", {})
    for name, data in model.files().items():
        (directory / name).write_bytes(data)
    # One file: two would need an index, and this is evaluated as it lies in a soak.
    write_safetensors(directory / "model.safetensors", [tensor for _, tensors in model.shards() for tensor in tensors])


def _tensors(seed: int) -> Iterator[TensorData]:
    rng = np.random.default_rng(seed)
    for name, shape in expected_shapes(HfConfig.model_validate(tiny_config())).items():
        values = (rng.standard_normal(shape) * 0.02).astype("<f4")
        yield TensorData(name, "F32", tuple(shape), values)


def _flawed(tensors: list[TensorData], flaw: Flaw | None) -> list[TensorData]:
    last = tensors[-1]
    if flaw is Flaw.TENSOR_MISSING:
        return tensors[:-1]
    if flaw is Flaw.NOT_FINITE:
        values = last.data.copy()
        values.flat[0] = np.nan
        return [*tensors[:-1], TensorData(last.name, last.dtype, last.shape, values)]
    if flaw is Flaw.WRONG_SHAPE:
        wider = (*last.shape[:-1], last.shape[-1] + 1)
        return [*tensors[:-1], TensorData(last.name, last.dtype, wider, np.zeros(wider, "<f4"))]
    return tensors
