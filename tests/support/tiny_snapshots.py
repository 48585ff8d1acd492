"""Tiny sound snapshots, made with numpy alone, that a test then damages in one place."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eval_service.admission.architectures import HfConfig, expected_shapes
from eval_service.chaos import snapshots
from eval_service.contract.canary import canary_token_ids
from eval_service.contract.manifest import Canary
from eval_service.contract.safetensors_io import TensorData, write_safetensors
from eval_service.contract.snapshot import Published, SnapshotWriter
from eval_service.contract.wire import DispatchRequest

VOCAB = 32
MODEL_TYPES = {"Qwen3ForCausalLM": "qwen3", "Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}
_NUMPY = {"float32": ("F32", "<f4"), "float16": ("F16", "<f2"), "bfloat16": ("BF16", "<u2")}


def tiny_config(architecture: str = "Qwen3ForCausalLM", **changes: Any) -> dict[str, Any]:
    """A config.json of a model with 2 layers of width 16."""
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 64}
    kind = {"architectures": [architecture], "model_type": MODEL_TYPES[architecture]}
    return snapshots.tiny_config(**{**sizes, **kind, **changes})


@dataclass(slots=True)
class Tiny:
    """The parts of a snapshot before they are written; tests change them at will."""

    config: dict[str, Any]
    tensors: dict[str, TensorData]
    texts: dict[str, bytes] = field(default_factory=dict)

    def shards(self, count: int) -> Iterator[tuple[str, list[TensorData]]]:
        """The tensors dealt out over `count` files."""
        yield from snapshots.deal_out(list(self.tensors.values()), count)

    def files(self) -> dict[str, bytes]:
        """All that is no weights."""
        return {"config.json": json.dumps(self.config).encode(), **self.texts}


def tensor(name: str, shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> TensorData:
    """Small random values of a config's dtype."""
    code, kind = _NUMPY[dtype]
    rng = np.random.default_rng([seed, *name.encode()])
    values = (rng.standard_normal(shape) * 0.02).astype("<f4")
    array = (values.view("<u4") >> 16).astype("<u2") if dtype == "bfloat16" else values.astype(kind)
    return TensorData(name, code, shape, array)


def tiny(architecture: str = "Qwen3ForCausalLM", *, seed: int = 0, **changes: Any) -> Tiny:
    """A sound model with a tokenizer."""
    config = tiny_config(architecture, **changes)
    shapes = expected_shapes(HfConfig.model_validate(config))
    made = {name: tensor(name, shape, config["dtype"], seed) for name, shape in shapes.items()}
    return Tiny(config, made, snapshots.tiny_texts(VOCAB))


def canary(vocab_size: int = VOCAB) -> Canary:
    """One as an exporter would write it."""
    ids = canary_token_ids(vocab_size, rows=2, length=4)
    return Canary(dtype="float32", token_ids=ids, logprobs=tuple((-3.0,) * (len(row) - 1) for row in ids))


def request(run: str, step: int, **changes: Any) -> DispatchRequest:
    """A dispatch under a reservation of its own."""
    return DispatchRequest.model_validate({"run": run, "step": step, "reservation": str(uuid.uuid4()), **changes})


def publish(
    model: Tiny, root: Path, *, run: str = "r1", step: int = 4, shards: int = 1, requests: int = 1, **changes: Any
) -> Published:
    """Export and publish a model as a trainer does; `changes` go to `SnapshotWriter`."""
    with SnapshotWriter(root, run, step, "tests 1", **changes) as writer:
        for name, tensors in model.shards(shards):
            writer.add_weights(name, tensors)
        for name, data in model.files().items():
            writer.add_bytes(name, data)
        dispatch = [request(run, step).model_dump(mode="json") for _ in range(requests)]
        return writer.publish(canary=canary(), dispatch=dispatch)


def lay_out(model: Tiny, directory: Path, *, shards: int = 1) -> Path:
    """Write a model as another exporter would: no manifest, no marker, and no index."""
    directory.mkdir(parents=True)
    for name, tensors in model.shards(shards):
        write_safetensors(directory / name, tensors)
    for name, data in model.files().items():
        (directory / name).write_bytes(data)
    return directory
