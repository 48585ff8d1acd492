"""AdamW on megatron's `main_grad`, clipping, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import Any

import torch

from trainer.config import TrainSection


def learning_rate(step: int, config: TrainSection) -> float:
    """The rate of step `step` (from 1): linear warm-up, then the schedule down to `min_lr` at the last step."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    span = max(1, config.num_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    left = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[config.schedule]
    return config.min_lr + (config.lr - config.min_lr) * left


class Optimizer:
    """torch's AdamW over the parameters that megatron accumulates gradients for."""

    def __init__(self, ddp: Any, config: TrainSection) -> None:
        self._config = config
        self._ddp = ddp
        self._params = [param for param in ddp.parameters() if param.requires_grad]
        decayed = [param for param in self._params if param.ndim >= 2]
        plain = [param for param in self._params if param.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            foreach=True,
        )

    def zero_grad(self) -> None:
        """Start a step."""
        self._ddp.zero_grad_buffer()

    def step(self, step: int) -> tuple[float, float]:
        """Apply the accumulated gradients; returns the rate and the gradients' norm before clipping."""
        rate = learning_rate(step, self._config)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        for param in self._params:
            param.grad = param.main_grad
        limit = self._config.clip_grad if self._config.clip_grad is not None else math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self._params, limit))
        self._adamw.step()
        for param in self._params:
            param.grad = None
        return rate, norm

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return self._adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's."""
        self._adamw.load_state_dict(state)
