"""The tensors that each loadable architecture must have: names and shapes, from config.json alone.

SGLang answers 200 when one is missing, short or extra, so this table is what stands between a bad export and a curve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

Shapes = dict[str, tuple[int, ...]]
EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
LAYER_PREFIX = "model.layers."
# Written by old exporters of Llama; a function of the config, which every loader computes anew.
IGNORED_SUFFIX = ".rotary_emb.inv_freq"

_Extent = Annotated[int, Field(gt=0, le=10**7, strict=True)]
_TokenId = Annotated[int, Field(strict=True)]
TokenIds = _TokenId | tuple[_TokenId, ...] | None


class HfConfig(BaseModel):
    """What is read of `config.json`; its other keys are not ours to judge."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    architectures: tuple[str, ...] = Field(min_length=1, max_length=1)
    model_type: str
    hidden_size: _Extent
    intermediate_size: _Extent
    num_hidden_layers: Annotated[int, Field(gt=0, le=10_000, strict=True)]
    num_attention_heads: _Extent
    num_key_value_heads: _Extent | None = None
    head_dim: _Extent | None = None
    vocab_size: _Extent
    max_position_embeddings: _Extent
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str | None = Field(default=None, validation_alias=AliasChoices("dtype", "torch_dtype"))
    eos_token_id: TokenIds = None
    auto_map: object = None
    quantization_config: object = None

    @property
    def architecture(self) -> str:
        """The one architecture that it names."""
        return self.architectures[0]


@dataclass(frozen=True, slots=True)
class Family:
    """What tells one decoder of this kind from another."""

    model_type: str
    qk_norm: bool = False
    default_head_dim: int | None = None  # None: hidden_size / heads
    qkv_bias: bool | None = None  # None: as config.attention_bias says
    o_bias: bool | None = None
    mlp_bias: bool = False  # whether config.mlp_bias counts


FAMILIES = {
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, default_head_dim=128),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, o_bias=False),
    "LlamaForCausalLM": Family("llama", mlp_bias=True),
}


def expected_shapes(config: HfConfig) -> Shapes:
    """Every tensor of the model and its shape.

    Args:
        config: of an architecture in `FAMILIES`.
    """
    hidden, family = config.hidden_size, FAMILIES[config.architecture]
    shapes: Shapes = {EMBEDDING: (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    layer = _layer(config, family)
    for number in range(config.num_hidden_layers):
        shapes |= {f"{LAYER_PREFIX}{number}.{name}": shape for name, shape in layer.items()}
    return shapes


def head_dim(config: HfConfig) -> int:
    """Width of one attention head."""
    default = FAMILIES[config.architecture].default_head_dim
    return config.head_dim or default or config.hidden_size // config.num_attention_heads


def _layer(config: HfConfig, family: Family) -> Shapes:
    hidden, width = config.hidden_size, head_dim(config)
    shapes: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    shapes |= _attention(config, family, width)
    if family.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (width,)}
    inner, biased = config.intermediate_size, family.mlp_bias and config.mlp_bias
    for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        shapes |= _linear(f"mlp.{name}_proj", rows, columns, bias=biased)
    return shapes


def _attention(config: HfConfig, family: Family, width: int) -> Shapes:
    hidden, heads = config.hidden_size, config.num_attention_heads
    q, kv = heads * width, (config.num_key_value_heads or heads) * width
    qkv_bias = config.attention_bias if family.qkv_bias is None else family.qkv_bias
    o_bias = config.attention_bias if family.o_bias is None else family.o_bias
    return (
        _linear("self_attn.q_proj", q, hidden, bias=qkv_bias)
        | _linear("self_attn.k_proj", kv, hidden, bias=qkv_bias)
        | _linear("self_attn.v_proj", kv, hidden, bias=qkv_bias)
        | _linear("self_attn.o_proj", hidden, q, bias=o_bias)
    )


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> Shapes:
    weight: Shapes = {f"{name}.weight": (rows, columns)}
    return {**weight, f"{name}.bias": (rows,)} if bias else weight
