"""A Hugging Face snapshot of the weights as they are now, through the contract's writer, with its canary.

Invariant: the weights are written in the base model's own dtype and its other files are copied as they are, so an
export of an untouched import has the import's tensors bit by bit, and the same digest each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eval_service.contract.canary import canary_token_ids
from eval_service.contract.manifest import Canary
from eval_service.contract.safetensors_io import TensorData
from eval_service.contract.snapshot import SnapshotWriter
from trainer import conversion
from trainer.architecture import Architecture
from trainer.model import Model

# What a model directory may hold beside its weights; anything else is somebody's note.
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
MAX_FILE_BYTES = 2 << 30
_DTYPES = {"float32": (torch.float32, "F32"), "bfloat16": (torch.bfloat16, "BF16"), "float16": (torch.float16, "F16")}


@dataclass(frozen=True, slots=True)
class Exporter:
    """Writes what the model holds; the files beside the weights come from the base model's directory."""

    model: Model
    hf_path: Path
    with_canary: bool = True
    max_file_bytes: int = MAX_FILE_BYTES

    def fill(self, writer: SnapshotWriter) -> None:
        """Write weights and the other files; no more than one file's tensors are held at a time.

        Raises:
            OSError: as the file system has it (disk full, say).
        """
        state = dict(self.model.gpt.named_parameters())
        shards = _shards(state, self.model.architecture, self.max_file_bytes)
        tensors = conversion.to_hf(state, self.model.architecture)
        dtype = self.model.architecture.dtype
        for number, count in enumerate(shards, 1):
            name = "model" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}"
            taken = [tensor_data(*next(tensors), dtype) for _ in range(count)]
            writer.add_weights(f"{name}.safetensors", taken)
        for source in (self.hf_path / name for name in MODEL_FILES):
            if source.is_file():
                writer.add_file(source)

    def canary(self) -> Canary | None:
        """Log-probs of the fixed sequences, from the trainer's own forward pass; None where it is turned off."""
        if not self.with_canary:
            return None
        ids = canary_token_ids(self.model.architecture.vocab_size)
        logprobs = self.model.logprobs(torch.tensor(ids))
        return Canary(
            dtype=self.model.architecture.dtype,
            token_ids=ids,
            logprobs=tuple(tuple(float(value) for value in row) for row in logprobs),
        )


def tensor_data(name: str, tensor: Tensor, dtype: str) -> TensorData:
    """A tensor's bytes in `dtype` (a name of torch's), for the writer."""
    torch_dtype, label = _DTYPES[dtype]
    held = tensor.detach().to("cpu", torch_dtype).contiguous()
    return TensorData(name, label, tuple(held.shape), held.view(torch.uint8).numpy())


def _shards(state: dict[str, Tensor], architecture: Architecture, limit: int) -> list[int]:
    """How many tensors go into each file, in order, so that none but a single huge tensor is above `limit` bytes."""
    item_bytes = _DTYPES[architecture.dtype][0].itemsize
    counts: list[int] = []
    held = 0
    for size in _sizes(state, architecture, item_bytes):
        if not counts or held + size > limit:
            counts.append(0)
            held = 0
        counts[-1] += 1
        held += size
    return counts


def _sizes(state: dict[str, Tensor], architecture: Architecture, item_bytes: int) -> Iterator[int]:
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in state.items()}
    for _, tensor in conversion.to_hf(shapes, architecture):
        yield tensor.numel() * item_bytes
