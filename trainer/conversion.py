"""Hugging Face names and layouts to megatron's and back: one table an architecture, read both ways.

Megatron keeps q, k and v in one matrix, interleaved by query group, and the MLP's gate above its up projection. Both
ways only move bytes, so an export of an untouched import equals it bit by bit. Each rule also says how tensor-parallel
ranks cut the parameter, so that a full tensor and the ranks' slices of it can be had from each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eval_service.contract.errors import ConfigError
from trainer.architecture import FIELD, LLAMA, QWEN2, QWEN3, Architecture

Join = Callable[[Sequence[Tensor], Architecture], Tensor]
Split = Callable[[Tensor, Architecture], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One megatron parameter and the Hugging Face tensors that it is made of; `{n}` is the layer.

    `dim` is what tensor-parallel ranks cut, each of `parts` stacked blocks by itself; None: every rank has it whole.
    `padded`: its rows are tokens, and there may be more of them than the vocabulary has.
    """

    megatron: str
    hf: tuple[str, ...]
    join: Join
    split: Split
    dim: int | None = None
    parts: int = 1
    padded: bool = False

    def at_layer(self, n: int) -> Rule:
        """This rule for layer `n`."""
        return replace(self, megatron=self.megatron.format(n=n), hf=tuple(name.format(n=n) for name in self.hf))


def _one(tensors: Sequence[Tensor], _: Architecture) -> Tensor:
    return tensors[0]


def _same(tensor: Tensor, _: Architecture) -> Sequence[Tensor]:
    return (tensor,)


def _cut_padding(tensor: Tensor, shape: Architecture) -> Sequence[Tensor]:
    return (tensor[: shape.vocab_size],)


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


_LAYER, _HF_LAYER = "decoder.layers.{n}", "model.layers.{n}"
_ATTENTION, _HF_ATTENTION = f"{_LAYER}.self_attention", f"{_HF_LAYER}.self_attn"


def _rule(megatron: str, hf: str, dim: int | None = None) -> Rule:
    return Rule(megatron, (hf,), _one, _same, dim)


def _rows_of_tokens(megatron: str, hf: str) -> Rule:
    return Rule(megatron, (hf,), _one, _cut_padding, dim=0, padded=True)


def _qkv(kind: str) -> Rule:
    parts = tuple(f"{_HF_ATTENTION}.{part}_proj.{kind}" for part in "qkv")
    return Rule(f"{_ATTENTION}.linear_qkv.{kind}", parts, _join_qkv, _split_qkv, dim=0)


_EMBEDDING = _rows_of_tokens("embedding.word_embeddings.weight", "model.embed_tokens.weight")
_HEAD = _rows_of_tokens("output_layer.weight", "lm_head.weight")
_FINAL_NORM = _rule("decoder.final_layernorm.weight", "model.norm.weight")
_BEFORE = (_rule(f"{_LAYER}.input_layernorm.weight", f"{_HF_LAYER}.input_layernorm.weight"), _qkv("weight"))
_QK_NORMS = (
    _rule(f"{_ATTENTION}.q_layernorm.weight", f"{_HF_ATTENTION}.q_norm.weight"),
    _rule(f"{_ATTENTION}.k_layernorm.weight", f"{_HF_ATTENTION}.k_norm.weight"),
)
_AFTER = (
    _rule(f"{_ATTENTION}.linear_proj.weight", f"{_HF_ATTENTION}.o_proj.weight", dim=1),
    _rule(f"{_LAYER}.pre_mlp_layernorm.weight", f"{_HF_LAYER}.post_attention_layernorm.weight"),
    Rule(
        f"{_LAYER}.mlp.linear_fc1.weight",
        (f"{_HF_LAYER}.mlp.gate_proj.weight", f"{_HF_LAYER}.mlp.up_proj.weight"),
        _join_rows,
        _split_rows,
        dim=0,
        parts=2,
    ),
    _rule(f"{_LAYER}.mlp.linear_fc2.weight", f"{_HF_LAYER}.mlp.down_proj.weight", dim=1),
)
LAYER_RULES = {
    QWEN3: (*_BEFORE, *_QK_NORMS, *_AFTER),
    QWEN2: (*_BEFORE, _qkv("bias"), *_AFTER),
    LLAMA: (*_BEFORE, *_AFTER),
}


_SHAPES: Mapping[str, Callable[[Architecture], tuple[int, ...]]] = {
    "word_embeddings.weight": lambda a: (a.vocab_size, a.hidden_size),
    "output_layer.weight": lambda a: (a.vocab_size, a.hidden_size),
    "linear_qkv.weight": lambda a: (_qkv_rows(a), a.hidden_size),
    "linear_qkv.bias": lambda a: (_qkv_rows(a),),
    "q_layernorm.weight": lambda a: (a.head_dim,),
    "k_layernorm.weight": lambda a: (a.head_dim,),
    "linear_proj.weight": lambda a: (a.hidden_size, a.num_heads * a.head_dim),
    "linear_fc1.weight": lambda a: (2 * a.ffn_size, a.hidden_size),
    "linear_fc2.weight": lambda a: (a.hidden_size, a.ffn_size),
    "input_layernorm.weight": lambda a: (a.hidden_size,),
    "pre_mlp_layernorm.weight": lambda a: (a.hidden_size,),
    "final_layernorm.weight": lambda a: (a.hidden_size,),
}


def _qkv_rows(shape: Architecture) -> int:
    return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim


def shape_of(rule: Rule, architecture: Architecture) -> tuple[int, ...]:
    """The shape of a rule's full megatron tensor, without padding."""
    return _SHAPES[".".join(rule.megatron.split(".")[-2:])](architecture)


def hf_shapes(rule: Rule, architecture: Architecture) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of a rule's Hugging Face tensors."""
    whole = torch.empty(shape_of(rule, architecture), device="meta")
    return [(name, tuple(part.shape)) for name, part in zip(rule.hf, rule.split(whole, architecture), strict=True)]


def rules_of(architecture: Architecture) -> Iterator[Rule]:
    """Every rule of a model, layers filled in, in the order of the forward pass."""
    yield _EMBEDDING
    for n in range(architecture.num_layers):
        yield from (rule.at_layer(n) for rule in LAYER_RULES[architecture.name])
    yield _FINAL_NORM
    if not architecture.tied:
        yield _HEAD


def check_names(found: Iterable[str], architecture: Architecture) -> None:
    """Hold the names of a model's tensors against the architecture's.

    Raises:
        ConfigError: one is missing, or one that the architecture does not have.
    """
    spare = set(found)
    for rule in rules_of(architecture):
        for name in rule.hf:
            if name not in spare:
                raise ConfigError(f"the model has no tensor {name}", field=FIELD, hint="is it complete?")
            spare.discard(name)
    if architecture.tied:
        spare.discard("lm_head.weight")  # some exporters write the shared tensor twice
    if spare:
        raise ConfigError(f"the model has a tensor {min(spare)} that {architecture.name} has not", field=FIELD)


def to_megatron(hf: Mapping[str, Tensor], architecture: Architecture) -> dict[str, Tensor]:
    """A state dict of megatron's names, of one rank and without padding, from tensors of Hugging Face's.

    Raises:
        ConfigError: as `check_names`.
    """
    check_names(hf, architecture)
    return {rule.megatron: rule.join([hf[name] for name in rule.hf], architecture) for rule in rules_of(architecture)}


def to_hf(state: Mapping[str, Tensor], architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of Hugging Face, lazily, in the order of the forward pass; tied heads are left out."""
    for rule in rules_of(architecture):
        yield from zip(rule.hf, rule.split(state[rule.megatron], architecture), strict=True)


def pad_rows(tensor: Tensor, rule: Rule, rows: int) -> Tensor:
    """Zero rows below, up to `rows`, where the rule's rows are tokens."""
    if not rule.padded or tensor.shape[0] == rows:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])


def cut(tensor: Tensor, rule: Rule, rank: int, world: int) -> Tensor:
    """What tensor-parallel rank `rank` of `world` holds of a full tensor."""
    if rule.dim is None or world == 1:
        return tensor
    blocks = [block.chunk(world, dim=rule.dim)[rank] for block in tensor.chunk(rule.parts, dim=rule.dim)]
    return torch.cat(blocks, dim=rule.dim)


def assemble(slices: Sequence[Tensor], rule: Rule) -> Tensor:
    """The full tensor from the slices of all tensor-parallel ranks, in their order."""
    if rule.dim is None or len(slices) == 1:
        return slices[0]
    blocks = [piece.chunk(rule.parts, dim=rule.dim) for piece in slices]
    return torch.cat([block[part] for part in range(rule.parts) for block in blocks], dim=rule.dim)
