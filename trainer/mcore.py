"""The one place that imports megatron-core.

It warns of every optional library that is not installed (Transformer Engine, Apex), and of itself; what is missing here
is missing by choice, so its own warnings are dropped, and nobody else's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Drop the warnings of megatron, and of the torch that it builds on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
        yield


with quiet():
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core import utils as megatron_utils
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, param_and_grad_buffer
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.common.embeddings import rotary_pos_embedding
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func, p2p_communication, schedules
    from megatron.core.tensor_parallel import layers as tensor_parallel_layers
    from megatron.core.tensor_parallel import mappings as tensor_parallel_mappings
    from megatron.core.tensor_parallel import random as tensor_parallel_random
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

__all__ = [
    "AsyncRequest",
    "AsyncSaveShardedStrategy",
    "CheckpointingConfig",
    "CheckpointingException",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GPTModel",
    "MegatronModule",
    "ModuleSpec",
    "OptimizerConfig",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StrictHandling",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "dist_checkpointing",
    "finalize_model_grads",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "get_num_layers_to_build",
    "get_transformer_layer_offset",
    "is_main_replica",
    "make_sharded_optimizer_tensor",
    "megatron_utils",
    "nested_values",
    "p2p_communication",
    "parallel_state",
    "param_and_grad_buffer",
    "quiet",
    "rotary_pos_embedding",
    "save_config",
    "schedules",
    "tensor_parallel_layers",
    "tensor_parallel_mappings",
    "tensor_parallel_random",
    "torch_strategy",
]
