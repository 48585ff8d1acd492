"""A tiny Qwen3 model for engine tests, made of numpy alone, and snapshots of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eval_service.contract.canary import canary_token_ids
from eval_service.contract.manifest import Canary, Manifest
from eval_service.contract.safetensors_io import TensorData, write_safetensors
from eval_service.contract.snapshot import SnapshotWriter, describe_directory
from eval_service.engine.fake import fake_canary

VOCAB_SIZE = 128
CONTEXT = 256
_HIDDEN, _HEADS, _KV_HEADS, _HEAD, _MLP, _LAYERS = 32, 4, 2, 8, 64, 2

_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "dtype": "float32",
    "eos_token_id": 1,
    "bos_token_id": None,
    "head_dim": _HEAD,
    "hidden_act": "silu",
    "hidden_size": _HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": _MLP,
    "max_position_embeddings": CONTEXT,
    "num_attention_heads": _HEADS,
    "num_hidden_layers": _LAYERS,
    "num_key_value_heads": _KV_HEADS,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model directory and its manifest, which is not written into it."""

    path: Path
    manifest: Manifest

    def with_canary(self, canary: Canary | None) -> Manifest:
        """The manifest with another canary."""
        return self.manifest.model_copy(update={"canary": canary})

    def proven(self) -> Manifest:
        """The manifest with the canary that a fake engine reproduces."""
        return self.with_canary(fake_canary(self.manifest.tensor_digest, canary_token_ids(VOCAB_SIZE)))


def make_model(
    path: Path, *, seed: int = 0, without: Sequence[str] = (), answers: Mapping[str, str] | None = None, step: int = 0
) -> TinyModel:
    """Write a model with random weights; `without` names tensors that are left out."""
    path.mkdir(parents=True)
    for name, data in _texts().items():
        (path / name).write_bytes(data)
    if answers is not None:
        (path / "fake_answers.json").write_text(json.dumps(answers))
    tensors = [tensor for tensor in _tensors(seed) if tensor.name not in without]
    write_safetensors(path / "model.safetensors", tensors)
    return TinyModel(path, describe_directory(path, run="run", step=step))


def odd_model(path: Path, what: str) -> Path:
    """A directory with one thing wrong, which SGLang is told to load all the same."""
    path.mkdir(parents=True)
    texts = _texts()
    tensors = {tensor.name: tensor for tensor in _tensors(9)}
    up, norm = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
    match what:
        case "a tensor renamed":
            tensors["model.layers.0.mlp.upper_proj.weight"] = tensors.pop(up)
        case "a tensor too many":
            tensors["model.layers.0.extra.weight"] = tensors[norm]
        case "values that are not finite":
            tensors[norm] = _made(norm, np.full(_HIDDEN, np.nan))
        case "another hidden_size":
            texts["config.json"] = json.dumps({**_CONFIG, "hidden_size": 2 * _HIDDEN}).encode()
        case "a short linear":
            tensors[up] = _made(up, np.ones((_MLP - 8, _HIDDEN)))
        case "a short norm":
            tensors[norm] = _made(norm, np.ones(_HIDDEN - 8))
    for name, data in texts.items():
        (path / name).write_bytes(data)
    write_safetensors(path / "model.safetensors", [_made(n, t.data) for n, t in tensors.items()])
    return path


def truncated(model: TinyModel, path: Path) -> TinyModel:
    """A snapshot whose manifest says that the short file is whole: the replica can't tell, and the engine dies."""
    shutil.copytree(model.path, path)
    shard = path / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-64])
    files = tuple(
        entry.model_copy(update={"size_bytes": entry.size_bytes - 64}) if entry.name == shard.name else entry
        for entry in model.manifest.files
    )
    return TinyModel(path, model.manifest.model_copy(update={"files": files}))


def _made(name: str, values: Any) -> TensorData:
    data = np.ascontiguousarray(values, dtype=np.float32)
    return TensorData(name, "F32", data.shape, data)


def write_model(writer: SnapshotWriter, *, seed: int, without: Sequence[str] = ()) -> None:
    """Write such a model into a snapshot that is being exported."""
    writer.add_weights("model.safetensors", [tensor for tensor in _tensors(seed) if tensor.name not in without])
    for name, data in _texts().items():
        writer.add_bytes(name, data)


def reference_canary(path: Path) -> Canary:
    """The canary as transformers has it, in float32: a second implementation."""
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    rows = canary_token_ids(VOCAB_SIZE)
    with torch.no_grad():
        logits = model(torch.tensor(rows)).logits.double()
    logprobs = torch.log_softmax(logits[:, :-1], dim=-1)
    wanted = logprobs.gather(-1, torch.tensor(rows)[:, 1:, None]).squeeze(-1)
    return Canary(dtype="float32", token_ids=rows, logprobs=tuple(tuple(row) for row in wanted.tolist()))


def _texts() -> dict[str, bytes]:
    files = {
        "config.json": _CONFIG,
        "generation_config.json": {"eos_token_id": 1},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
        },
    }
    return {name: json.dumps(content).encode() for name, content in files.items()}


def _tensors(seed: int) -> list[TensorData]:
    random = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (VOCAB_SIZE, _HIDDEN), "model.norm.weight": (_HIDDEN,)}
    for layer in range(_LAYERS):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in _layer_shapes().items()}
    tensors = []
    for name, shape in shapes.items():
        spread = random.standard_normal(shape).astype(np.float32)
        data = 1.0 + 0.1 * spread if len(shape) == 1 else 0.2 * spread
        tensors.append(TensorData(name, "F32", shape, np.ascontiguousarray(data)))
    return tensors


def _layer_shapes() -> dict[str, tuple[int, ...]]:
    return {
        "input_layernorm": (_HIDDEN,),
        "post_attention_layernorm": (_HIDDEN,),
        "self_attn.q_proj": (_HEADS * _HEAD, _HIDDEN),
        "self_attn.k_proj": (_KV_HEADS * _HEAD, _HIDDEN),
        "self_attn.v_proj": (_KV_HEADS * _HEAD, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD),
        "self_attn.q_norm": (_HEAD,),
        "self_attn.k_norm": (_HEAD,),
        "mlp.gate_proj": (_MLP, _HIDDEN),
        "mlp.up_proj": (_MLP, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _MLP),
    }


def _tokenizer() -> dict[str, Any]:
    vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{chr(code): 3 + code - 32 for code in range(32, 127)}}
    special = [
        {
            "id": i,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, name in enumerate(("<pad>", "<eos>", "<unk>"))
    ]
    return {
        "version": "1.0",
        "added_tokens": special,
        "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "unk_token": "<unk>", "vocab": vocab, "merges": []},
    }
