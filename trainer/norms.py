"""RMSNorm that megatron can build, marked for sequence parallelism (torch's own is refused there)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm


class Norm(nn.Module):
    """As megatron builds norms: `hidden_size` is the size of the last dimension."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Each rank sees a part of the sequence, so megatron sums this gradient over them.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same."""
        return rms_norm(hidden, self.weight.shape, self.weight, self.eps)
