"""The one place that imports megatron-core.

Its import warns of every optional library that is not installed (Transformer Engine, Apex); what is missing here is
missing by choice, so those warnings are dropped and nothing else is.
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed.*")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, param_and_grad_buffer
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.common.embeddings import rotary_pos_embedding
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
    from megatron.core.tensor_parallel import random as tensor_parallel_random
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GPTModel",
    "MegatronModule",
    "ModuleSpec",
    "TransformerConfig",
    "finalize_model_grads",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "parallel_state",
    "param_and_grad_buffer",
    "rotary_pos_embedding",
    "schedules",
    "tensor_parallel_random",
]
