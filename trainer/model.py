"""Builds megatron's GPTModel for an architecture, wrapped for gradient accumulation, and runs it.

Invariant: weights always come from a Hugging Face directory or a checkpoint, so nothing is initialised here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import silu

from trainer.architecture import Architecture
from trainer.attention import CausalAttention
from trainer.mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GPTModel,
    ModuleSpec,
    TransformerConfig,
    finalize_model_grads,
    get_gpt_layer_local_spec,
    quiet,
)


@dataclass(frozen=True, slots=True)
class Model:
    """`gpt` is the bare model, `ddp` the same under megatron's gradient buffers; parameters are shared."""

    architecture: Architecture
    gpt: Any
    ddp: Any

    @torch.no_grad()
    def logprobs(self, token_ids: torch.Tensor) -> torch.Tensor:
        """log p(id[j + 1] | ids[: j + 1]), natural log, float32: [b, s] ids -> [b, s - 1]."""
        positions = torch.arange(token_ids.shape[1]).expand_as(token_ids)
        self.gpt.eval()
        try:
            with quiet():
                logits = self.gpt(token_ids, positions, None)
        finally:
            self.gpt.train()
        table = logits[:, :-1].float().log_softmax(-1)
        return table.gather(-1, token_ids[:, 1:, None]).squeeze(-1)


def build_model(architecture: Architecture) -> Model:
    """An uninitialised model in float32."""
    with quiet():
        return _build(architecture)


def _build(architecture: Architecture) -> Model:
    config = _transformer_config(architecture)
    spec = get_gpt_layer_local_spec(qk_layernorm=architecture.qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = ModuleSpec(module=CausalAttention)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=architecture.vocab_size,
        max_sequence_length=architecture.max_positions,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
    )
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), gpt)
    return Model(architecture, gpt, ddp)


def _transformer_config(architecture: Architecture) -> Any:
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_kv_heads,
        kv_channels=architecture.head_dim,
        layernorm_epsilon=architecture.norm_eps,
        normalization="RMSNorm",
        qk_layernorm=architecture.qk_norm,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        cuda_graph_scope=[],
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        # Gradients are of the mean over the tokens of the whole batch, however they fall into micro-batches and ranks.
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
    )
