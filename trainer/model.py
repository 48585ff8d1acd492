"""Builds this rank's part of megatron's GPTModel, wrapped for gradient accumulation, and runs it.

Invariants: weights always come from a Hugging Face directory or a checkpoint, so nothing is initialised here.
Parameters are known to everybody else by their global names, whichever stage holds them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from trainer import conversion, cpu_megatron
from trainer.architecture import Architecture
from trainer.attention import CausalAttention
from trainer.config import ParallelSection
from trainer.mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GPTModel,
    ModuleSpec,
    TransformerBlockSubmodules,
    TransformerConfig,
    finalize_model_grads,
    get_forward_backward_func,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
    get_transformer_layer_offset,
    quiet,
)
from trainer.norms import Norm
from trainer.parallel import Place, Ranks
from trainer.rope import Positions, inverse_frequencies

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_HEAD, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class Model:
    """`gpt` is the bare model, `ddp` the same under megatron's gradient buffers; parameters are shared.

    `rows` is the size of the vocabulary with its padding, `positions` where a forward pass is told the tokens' own.
    """

    architecture: Architecture
    gpt: Any
    ddp: Any
    ranks: Ranks
    place: Place
    rows: int
    dtype: str
    positions: Positions

    def parameters(self) -> dict[str, Tensor]:
        """Global name to this rank's slice; a tied head on a last stage of its own comes under the head's name."""
        offset = get_transformer_layer_offset(self.gpt.config)
        return {_global_name(name, offset): param for name, param in self.gpt.named_parameters()}

    def owned(self) -> dict[str, Tensor]:
        """Of those, what this rank alone answers for (but for tensor-parallel copies of what is not cut)."""
        second_copy = self.architecture.tied and not self.place.first_stage
        return {
            name: param.detach()
            for name, param in self.parameters().items()
            if self.place.data == 0 and not (second_copy and name == _HEAD)
        }

    @torch.no_grad()
    def load(self, rule: conversion.Rule, whole: Tensor) -> None:
        """Take this rank's slice of a rule's full tensor, if it has any.

        Raises:
            RuntimeError: its shape is another.
        """
        params = self.parameters()
        names = [rule.megatron, _HEAD] if rule.megatron == _EMBEDDING and self.architecture.tied else [rule.megatron]
        held = [params[name] for name in names if name in params]
        wanted = conversion.shape_of(rule, self.architecture)
        if tuple(whole.shape) != wanted:
            raise RuntimeError(f"{', '.join(rule.hf)}: {tuple(whole.shape)} instead of {wanted}")
        if held:
            padded = conversion.pad_rows(whole, rule, self.rows)
            piece = conversion.cut(padded, rule, self.place.tensor, self.place.tensor_world)
            for param in held:
                param.copy_(piece)

    @torch.no_grad()
    def logprobs(self, token_ids: Tensor) -> Tensor:
        """log p(id[j + 1] | ids[: j + 1]), natural log, float32: [b, s] ids -> [b, s - 1], on all ranks. Collective."""
        tokens = token_ids.to(self.ranks.device)
        labels = tokens.roll(-1, dims=1)
        self.gpt.eval()
        try:
            with quiet():
                outcome = get_forward_backward_func()(
                    forward_step_func=partial(_losses, labels=labels),
                    data_iterator=iter([tokens]),
                    model=[self.gpt],
                    num_microbatches=1,
                    seq_length=tokens.shape[1],
                    micro_batch_size=tokens.shape[0],
                    forward_only=True,
                )
        finally:
            self.gpt.train()
        here = self.place.last_stage and self.place.tensor == 0 and self.place.data == 0
        losses = outcome[0]["losses"].float().cpu() if here else torch.zeros(token_ids.shape)
        return -self.ranks.main.sum(losses)[:, :-1]


def _losses(batches: Iterator[Tensor], gpt: Any, *, labels: Tensor) -> tuple[Tensor, Any]:
    tokens = next(batches)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return gpt(tokens, positions, None, labels=labels), _keep


def _keep(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return losses.sum(), torch.ones((), dtype=torch.int, device=losses.device), {"losses": losses}


def _global_name(name: str, offset: int) -> str:
    head, layers, rest = name.partition("decoder.layers.")
    if not layers:
        return name
    number, _, tail = rest.partition(".")
    return f"{head}{layers}{int(number) + offset}.{tail}"


def build_model(
    architecture: Architecture, ranks: Ranks, parallel: ParallelSection | None = None, dtype: str = "float32"
) -> Model:
    """This rank's part, uninitialised; `dtype` is that of parameters and activations."""
    parallel = parallel or ParallelSection()
    place = Place.here()
    config = _transformer_config(architecture, parallel, DTYPES[dtype], ranks.device)
    multiple = math.lcm(parallel.vocab_multiple, parallel.tensor)
    rows = -(-architecture.vocab_size // multiple) * multiple
    with quiet(), cpu_megatron.building():
        gpt = _gpt(architecture, config, place, rows)
        _mark_cut(gpt, architecture)
        on_gpu = ranks.device.type == "cuda"
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=on_gpu)
        positions = Positions()
        gpt.rotary_pos_emb.register_forward_hook(positions)
        ddp = DistributedDataParallel(config, ddp_config, gpt)
        # Its hooks hold it from autograd's side, where Python's collector doesn't look: model, groups and the groups'
        # threads would stay for as long as the process lives.
        ranks.closing.callback(ddp.grad_accs.clear)
        return Model(architecture, gpt, ddp, ranks, place, rows, dtype, positions)


def _gpt(architecture: Architecture, config: Any, place: Place, rows: int) -> Any:
    spec = get_gpt_layer_local_spec(qk_layernorm=architecture.qk_norm, normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    attention = layer.self_attention.submodules
    attention.core_attention = ModuleSpec(module=CausalAttention)
    if architecture.qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=_layers(spec, config), layer_norm=Norm),
        vocab_size=rows,
        max_sequence_length=architecture.max_positions,
        pre_process=place.first_stage,
        post_process=place.last_stage,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope",
        rotary_base=architecture.rope.theta,
    )
    gpt.rotary_pos_emb.inv_freq = inverse_frequencies(architecture.rope, architecture.head_dim).to(
        gpt.rotary_pos_emb.inv_freq.device
    )
    if place.last_stage:
        _mask_padding(gpt.output_layer, architecture.vocab_size, rows, place)
    return gpt.to(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else gpt


def _mark_cut(gpt: Any, architecture: Architecture) -> None:
    """Say which parameters tensor-parallel ranks cut: norms of gradients ask, and only megatron's own initialisation,
    which is not run, would say it."""
    dims = {rule.megatron: rule.dim for rule in conversion.rules_of(architecture)}
    dims.setdefault(_HEAD, dims[_EMBEDDING])
    offset = get_transformer_layer_offset(gpt.config)
    for name, param in gpt.named_parameters():
        dim = dims[_global_name(name, offset)]
        if dim is not None:
            param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, 1


def _layers(spec: Any, config: Any) -> list[Any]:
    return [spec] * get_num_layers_to_build(config)


def _mask_padding(head: Any, vocab_size: int, rows: int, place: Place) -> None:
    """The padding's logits count for nothing, so padding changes neither losses nor log-probs."""
    each = rows // place.tensor_world
    real = min(max(vocab_size - place.tensor * each, 0), each)
    if real == each:
        return

    def mask(_: Any, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits = output[0]
        logits[..., real:] = torch.finfo(logits.dtype).min
        return (logits, *output[1:])

    head.register_forward_hook(mask)


def _transformer_config(
    architecture: Architecture, parallel: ParallelSection, dtype: torch.dtype, device: torch.device
) -> Any:
    on_cpu = device.type == "cpu"
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
        add_qkv_bias=architecture.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        cuda_graph_scope=[],
        use_cpu_initialization=on_cpu,
        perform_initialization=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Gradients are of the mean over the tokens of the whole batch, however they fall into micro-batches and ranks.
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        **_parallel_settings(parallel, on_cpu),
    )


def _parallel_settings(parallel: ParallelSection, on_cpu: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "sequence_parallel": parallel.sequence_parallel,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        "batch_p2p_comm": not on_cpu,
        "deallocate_pipeline_outputs": True,
    }
    if parallel.recompute:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return settings
