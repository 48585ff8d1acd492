"""What of a Hugging Face `config.json` the model is built from; what can't be trained is refused by name.

Invariant: needs neither torch nor megatron, so a refusal comes before anything heavy is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval_service.contract.errors import ConfigError

FIELD = "model.hf_path"
QWEN3, QWEN2, LLAMA = "Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Family:
    """What sets one architecture apart from the others; `head_dim` None: hidden size by heads."""

    qk_norm: bool
    qkv_bias: bool
    head_dim: int | None = None


FAMILIES: Mapping[str, Family] = {
    QWEN3: Family(qk_norm=True, qkv_bias=False, head_dim=128),
    QWEN2: Family(qk_norm=False, qkv_bias=True),
    LLAMA: Family(qk_norm=False, qkv_bias=False),
}
SUPPORTED = tuple(FAMILIES)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: `kind` is transformers' `rope_type`; the rest is read by the kind that has it."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shape of a decoder; sizes are counts, `dtype` is that of the weights on disk."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    dtype: str


def read_architecture(hf_path: Path) -> Architecture:
    """Read and check `config.json` of a Hugging Face directory.

    Raises:
        ConfigError: no such directory or file, an architecture that is not supported, or a feature that is not.
    """
    table = _read_config(hf_path)
    name = str((table.get("architectures") or ["none"])[0])
    if name not in SUPPORTED:
        raise ConfigError(
            f"architecture {name} can't be trained", field=FIELD, hint=f"supported: {', '.join(SUPPORTED)}"
        )
    _refuse_features(table)
    try:
        return _architecture(name, table)
    except KeyError as exc:
        raise ConfigError(f"config.json has no {exc.args[0]}", field=FIELD, hint="save it with transformers") from exc


def _read_config(hf_path: Path) -> dict[str, Any]:
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        if not (hf_path / name).is_file():
            raise ConfigError(f"{hf_path / name} is not there", field=FIELD, hint="name a Hugging Face model directory")
    if not any(hf_path.glob("*.safetensors")):
        raise ConfigError(f"{hf_path} holds no safetensors file", field=FIELD, hint="save the model as safetensors")
    try:
        table = json.loads((hf_path / "config.json").read_text())
    except ValueError as exc:
        raise ConfigError(f"config.json is no JSON: {exc}", field=FIELD, hint="save it with transformers") from exc
    if not isinstance(table, dict):
        raise ConfigError("config.json is no object", field=FIELD, hint="save it with transformers")
    return table


def _rope(table: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 nests it; before, theta and scaling lay at the top.
    nested = table.get("rope_parameters") or table.get("rope_scaling") or {}
    return {"rope_theta": table.get("rope_theta", 10000.0), "rope_type": nested.get("type", "default"), **nested}


def _read_rope(table: dict[str, Any]) -> Rope:
    found = _rope(table)
    return Rope(
        theta=float(found["rope_theta"]),
        kind=str(found["rope_type"]),
        factor=float(found.get("factor", 1.0)),
        low_freq_factor=float(found.get("low_freq_factor", 1.0)),
        high_freq_factor=float(found.get("high_freq_factor", 4.0)),
        original_max_positions=int(found.get("original_max_position_embeddings", table["max_position_embeddings"])),
    )


def _refuse_features(table: dict[str, Any]) -> None:
    wanted = {
        "hidden_act": (table.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(table.get("attention_bias", False)), False),
        "use_sliding_window": (bool(table.get("use_sliding_window", False)), False),
        "mlp_bias": (bool(table.get("mlp_bias", False)), False),
        "layer_types": (sorted({*table.get("layer_types", ()), "full_attention"}), ["full_attention"]),
        "partial_rotary_factor": (float(_rope(table).get("partial_rotary_factor", 1.0)), 1.0),
    }
    for key, (value, only) in wanted.items():
        if value != only:
            raise ConfigError(f"config.json: {key} = {value!r} can't be trained", field=FIELD, hint=f"only {only!r}")
    kind = _rope(table)["rope_type"]
    if kind not in ROPE_KINDS:
        raise ConfigError(
            f"config.json: rope_type = {kind!r} can't be trained", field=FIELD, hint=f"one of {', '.join(ROPE_KINDS)}"
        )
    dtype = _dtype(table)
    if dtype not in DTYPES:
        raise ConfigError(f"config.json: dtype {dtype} can't be trained", field=FIELD, hint=f"one of {DTYPES}")


def _dtype(table: dict[str, Any]) -> str:
    return str(table.get("dtype") or table.get("torch_dtype") or "float32")


def _architecture(name: str, table: dict[str, Any]) -> Architecture:
    heads, family = int(table["num_attention_heads"]), FAMILIES[name]
    return Architecture(
        name=name,
        num_layers=int(table["num_hidden_layers"]),
        hidden_size=int(table["hidden_size"]),
        ffn_size=int(table["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(table.get("num_key_value_heads") or heads),
        head_dim=int(table.get("head_dim") or family.head_dim or int(table["hidden_size"]) // heads),
        vocab_size=int(table["vocab_size"]),
        max_positions=int(table["max_position_embeddings"]),
        norm_eps=float(table["rms_norm_eps"]),
        rope=_read_rope(table),
        tied=bool(table.get("tie_word_embeddings", False)),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        dtype=_dtype(table),
    )
