"""Megatron's core attention on torch's `scaled_dot_product_attention`.

The stock one forks the CUDA random state. Batches are padded on the right, so the causal mask alone keeps real tokens
from seeing padding; where conversations share a row, a mask keeps them apart. Without one this is flash attention on a
GPU, and the memory-efficient kind with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from trainer.mcore import MegatronModule


class CausalAttention(MegatronModule):
    """Causal attention over query groups; heads are this tensor-parallel rank's own."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        visible: torch.Tensor | None = None,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """[s, b, heads, d] and [s, b, groups, d] twice -> [s, b, heads * d].

        Args:
            visible: [b, 1, s, s], true where a token may see another (megatron's own masks are the other way round);
                None: all that is not after it.
        """
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        grouped, causal = q.shape[1] != k.shape[1], visible is None
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=causal, scale=self.softmax_scale, enable_gqa=grouped
        )
        return out.permute(2, 0, 1, 3).flatten(2)
