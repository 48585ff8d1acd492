"""Hugging Face names and layouts to megatron's and back: one table, read both ways.

Megatron keeps q, k and v in one matrix, interleaved by query group, and the MLP's gate above its up projection. Both
ways only move bytes, so an export of an untouched import equals it bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval_service.contract.errors import ConfigError
from trainer.architecture import FIELD, QWEN3, Architecture

Join = Callable[[Sequence[Tensor], Architecture], Tensor]
Split = Callable[[Tensor, Architecture], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One megatron parameter and the Hugging Face tensors that it is made of; `{n}` is the layer."""

    megatron: str
    hf: tuple[str, ...]
    join: Join
    split: Split


def _one(tensors: Sequence[Tensor], _: Architecture) -> Tensor:
    return tensors[0]


def _same(tensor: Tensor, _: Architecture) -> Sequence[Tensor]:
    return (tensor,)


def _join_qkv(tensors: Sequence[Tensor], shape: Architecture) -> Tensor:
    groups = [tensor.reshape(shape.num_kv_heads, -1, *tensor.shape[1:]) for tensor in tensors]
    return torch.cat(groups, dim=1).flatten(0, 1)


def _split_qkv(tensor: Tensor, shape: Architecture) -> Sequence[Tensor]:
    per_group = shape.num_heads // shape.num_kv_heads
    sizes = [per_group * shape.head_dim, shape.head_dim, shape.head_dim]
    groups = tensor.reshape(shape.num_kv_heads, -1, *tensor.shape[1:])
    return [part.flatten(0, 1) for part in torch.split_with_sizes(groups, sizes, dim=1)]


def _join_rows(tensors: Sequence[Tensor], _: Architecture) -> Tensor:
    return torch.cat(tuple(tensors))


def _split_rows(tensor: Tensor, _: Architecture) -> Sequence[Tensor]:
    return tensor.chunk(2)


def _rule(megatron: str, *hf: str, join: Join = _one, split: Split = _same) -> Rule:
    return Rule(megatron, hf, join, split)


_LAYER, _HF_LAYER = "decoder.layers.{n}", "model.layers.{n}"
_EMBEDDING = _rule("embedding.word_embeddings.weight", "model.embed_tokens.weight")
_HEAD = _rule("output_layer.weight", "lm_head.weight")
_FINAL_NORM = _rule("decoder.final_layernorm.weight", "model.norm.weight")
_QWEN3_LAYER = (
    _rule(f"{_LAYER}.input_layernorm.weight", f"{_HF_LAYER}.input_layernorm.weight"),
    _rule(
        f"{_LAYER}.self_attention.linear_qkv.weight",
        *(f"{_HF_LAYER}.self_attn.{part}_proj.weight" for part in "qkv"),
        join=_join_qkv,
        split=_split_qkv,
    ),
    _rule(f"{_LAYER}.self_attention.q_layernorm.weight", f"{_HF_LAYER}.self_attn.q_norm.weight"),
    _rule(f"{_LAYER}.self_attention.k_layernorm.weight", f"{_HF_LAYER}.self_attn.k_norm.weight"),
    _rule(f"{_LAYER}.self_attention.linear_proj.weight", f"{_HF_LAYER}.self_attn.o_proj.weight"),
    _rule(f"{_LAYER}.pre_mlp_layernorm.weight", f"{_HF_LAYER}.post_attention_layernorm.weight"),
    _rule(
        f"{_LAYER}.mlp.linear_fc1.weight",
        *(f"{_HF_LAYER}.mlp.{part}_proj.weight" for part in ("gate", "up")),
        join=_join_rows,
        split=_split_rows,
    ),
    _rule(f"{_LAYER}.mlp.linear_fc2.weight", f"{_HF_LAYER}.mlp.down_proj.weight"),
)
LAYER_RULES = {QWEN3: _QWEN3_LAYER}


def rules_of(architecture: Architecture) -> Iterator[Rule]:
    """Every rule of a model, layers filled in, in the order of the forward pass."""
    yield _EMBEDDING
    for n in range(architecture.num_layers):
        for rule in LAYER_RULES[architecture.name]:
            names = tuple(name.format(n=n) for name in rule.hf)
            yield Rule(rule.megatron.format(n=n), names, rule.join, rule.split)
    yield _FINAL_NORM
    if not architecture.tied:
        yield _HEAD


def to_megatron(hf: Mapping[str, Tensor], architecture: Architecture) -> dict[str, Tensor]:
    """A state dict of megatron's names from tensors of Hugging Face's.

    Raises:
        ConfigError: a tensor is missing, of another shape, or one that the architecture does not have.
    """
    spare = set(hf)
    state: dict[str, Tensor] = {}
    for rule in rules_of(architecture):
        missing = [name for name in rule.hf if name not in hf]
        if missing:
            raise ConfigError(f"the model has no tensor {missing[0]}", field=FIELD, hint="is it complete?")
        spare.difference_update(rule.hf)
        state[rule.megatron] = rule.join([hf[name] for name in rule.hf], architecture)
    if architecture.tied:
        spare.discard("lm_head.weight")  # some exporters write the shared tensor twice
    if spare:
        raise ConfigError(f"the model has a tensor {min(spare)} that {architecture.name} has not", field=FIELD)
    return state


def to_hf(state: Mapping[str, Tensor], architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of Hugging Face, lazily, in the order of the forward pass; tied heads are left out."""
    for rule in rules_of(architecture):
        yield from zip(rule.hf, rule.split(state[rule.megatron], architecture), strict=True)
