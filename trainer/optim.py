"""The optimizer, clipping, and the learning rate as a pure function of the step.

On GPUs it is megatron's, distributed over the data-parallel ranks; it can't be built without CUDA, so on the CPU it is
torch's AdamW on megatron's `main_grad`. Both keep float32 main parameters where the model is in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from trainer.config import TrainSection
from trainer.mcore import (
    OptimizerConfig,
    get_megatron_optimizer,
    is_main_replica,
    make_sharded_optimizer_tensor,
    parallel_state,
    quiet,
)
from trainer.model import DTYPES, Model
from trainer.sharding import Shards
from trainer.shares import share_shards


def learning_rate(step: int, config: TrainSection) -> float:
    """The rate of step `step` (from 1): linear warm-up, then the schedule down to `min_lr` at the last step."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    span = max(1, config.num_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    left = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[config.schedule]
    return config.min_lr + (config.lr - config.min_lr) * left


class Optimizer(Protocol):
    """What a training step and a checkpoint ask of an optimizer."""

    def step(self, step: int) -> tuple[float, float]:
        """Apply the accumulated gradients; returns the rate and the gradients' norm before clipping. Collective."""

    def reload(self) -> None:
        """The parameters were set from outside: main copies follow them."""

    def shards(self, model: Shards) -> dict[str, Any]:
        """What a checkpoint holds of it, beside the model's own shards: main parameters, moments, steps, as they lie.

        No communication; a checkpoint is read into the same tensors.
        """

    def sizes(self, model: Shards) -> Iterator[int]:
        """Bytes of each tensor of `shards` that this rank writes, before a step has made them too."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that it holds on the device beside the parameters and their gradients."""

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what was read into `shards`."""


def build_optimizer(model: Model, config: TrainSection) -> Optimizer:
    """Megatron's on GPUs, torch's on the CPU."""
    if model.ranks.device.type == "cuda":
        return MegatronOptimizer(model, config)
    return HostOptimizer(model, config)


class MegatronOptimizer:
    """Megatron's distributed Adam, with float32 main parameters cut over the data-parallel ranks."""

    def __init__(self, model: Model, config: TrainSection) -> None:
        self._config = config
        self._settings = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad or 0.0,
            bf16=model.dtype == "bfloat16",
            params_dtype=DTYPES[model.dtype],
            use_distributed_optimizer=True,
        )
        with quiet():
            self._optimizer = get_megatron_optimizer(self._settings, [model.ddp])

    def step(self, step: int) -> tuple[float, float]:
        """As `Optimizer.step`."""
        rate = learning_rate(step, self._config)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        with quiet():
            _, norm, _ = self._optimizer.step()
            self._optimizer.zero_grad()
        return rate, float(norm or 0.0)

    def reload(self) -> None:
        """As `Optimizer.reload`."""
        self._optimizer.reload_model_params()

    def shards(self, model: Shards) -> dict[str, Any]:
        """As `Optimizer.shards`; a rank's are its share of its data-parallel group's, so nothing is gathered."""
        part = self._part
        _ensure_moments(part.optimizer)  # megatron asks for the steps of a state that is there
        of = {shard.data: shard for shard in model.values()}
        shares = {}
        for param, start in _shares(part):
            held = part._get_main_param_and_optimizer_states(param)
            shares[of[param].key] = {
                kind: share_shards(of[param], start, held[kind].detach(), f"optimizer.state.{kind}")
                for kind in ("param", *_MOMENTS)
            }
        return {**part.state_dict(), "param_state": shares}

    def sizes(self, model: Shards) -> Iterator[int]:
        """As `Optimizer.sizes`."""
        for main in _mains(self._part.optimizer):
            yield from [main.nbytes] * 3

    def tensors(self) -> Iterator[torch.Tensor]:
        """As `Optimizer.tensors`."""
        yield from _tensors_of(self._part.optimizer)

    @property
    def _part(self) -> Any:
        """The one of a model without experts; its own `optimizer` is torch's, over this rank's share."""
        (part,) = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        return part

    def load(self, state: dict[str, Any]) -> None:
        """As `Optimizer.load`; main parameters and moments were read where they lie."""
        with quiet():
            self._optimizer.load_state_dict({name: value for name, value in state.items() if name != "param_state"})
        # Megatron gives all parameters one and the same count, which each would raise.
        for held in self._part.optimizer.state.values():
            held["step"] = held["step"].clone()


def _shares(part: Any) -> Iterator[tuple[Any, int]]:
    """The parameters of which this rank has a share, and where each begins."""
    for buffer in part.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                yield from ((param, ranges["param"].start) for param, ranges in bucket["param_map"].items())


_MOMENTS = ("exp_avg", "exp_avg_sq")


class HostOptimizer:
    """torch's AdamW over the parameters that megatron accumulates gradients for."""

    def __init__(self, model: Model, config: TrainSection) -> None:
        self._config = config
        self._params = [param for param in model.ddp.parameters() if param.requires_grad]
        self._counts = [_counts(param, model.place.tensor) for param in self._params]
        # In float32 the main parameters are the parameters.
        self._main = [
            param if param.dtype is torch.float32 else param.detach().float().requires_grad_() for param in self._params
        ]
        decayed = [param for param in self._main if param.ndim >= 2]
        plain = [param for param in self._main if param.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            foreach=True,
        )

    def step(self, step: int) -> tuple[float, float]:
        """As `Optimizer.step`."""
        rate = learning_rate(step, self._config)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        for param, main in zip(self._params, self._main, strict=True):
            main.grad = param.main_grad
        norm = self._norm()
        if self._config.clip_grad is not None and norm > self._config.clip_grad:
            torch._foreach_mul_([main.grad for main in self._main], self._config.clip_grad / (norm + 1e-6))
        self._adamw.step()
        for param, main in zip(self._params, self._main, strict=True):
            main.grad = None
            if main is not param:
                param.data.copy_(main.data)
        return rate, norm

    @torch.no_grad()
    def reload(self) -> None:
        """As `Optimizer.reload`."""
        for param, main in zip(self._params, self._main, strict=True):
            if main is not param:
                main.copy_(param)

    def shards(self, model: Shards) -> dict[str, Any]:
        """As `Optimizer.shards`."""
        held = self._held()
        state = {
            name: {
                kind: make_sharded_optimizer_tensor(shard, tensor, prefix=f"optimizer.state.{kind}")
                for kind, tensor in held[shard.data].items()
            }
            for name, shard in model.items()
        }
        steps = {float(self._adamw.state[main]["step"]) for main in self._main}
        return {"steps": max(steps), "state": state}

    def sizes(self, model: Shards) -> Iterator[int]:
        """As `Optimizer.sizes`."""
        for shard in model.values():
            if is_main_replica(shard.replica_id):
                kinds = 2 if shard.data.dtype is torch.float32 else 3
                yield from [4 * shard.data.numel()] * kinds

    def tensors(self) -> Iterator[torch.Tensor]:
        """As `Optimizer.tensors`."""
        yield from _tensors_of(self._adamw)

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """As `Optimizer.load`."""
        for main in self._main:
            self._adamw.state[main]["step"].fill_(state["steps"])

    def _held(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """The tensors of each parameter; moments that no step has made yet are zero."""
        held = {}
        _ensure_moments(self._adamw)
        for param, main in zip(self._params, self._main, strict=True):
            state = self._adamw.state[main]
            held[param] = {kind: state[kind] for kind in _MOMENTS} | ({} if main is param else {"param": main})
        return held

    def _norm(self) -> float:
        grads = [
            main.grad for main, counts in zip(self._main, self._counts, strict=True) if counts and main.grad is not None
        ]
        norms = torch.stack(torch._foreach_norm(grads)) if grads else torch.zeros(1)
        total = torch.linalg.vector_norm(norms) ** 2
        group = parallel_state.get_model_parallel_group()
        if torch.distributed.get_world_size(group) > 1:
            torch.distributed.all_reduce(total, group=group)
        return float(total.sqrt())


def _ensure_moments(optimizer: Any) -> None:
    """Those that no step has made yet are zero."""
    for main in _mains(optimizer):
        if not (state := optimizer.state[main]):
            state["step"] = torch.zeros(())
            state |= {kind: torch.zeros_like(main.data) for kind in _MOMENTS}


def _mains(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _tensors_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """Main parameters and moments; a count of steps stays where it is."""
    for main in _mains(optimizer):
        yield main.data
        held = optimizer.state.get(main, {}).values()
        yield from (value for value in held if isinstance(value, torch.Tensor) and value.ndim)


def _counts(param: Any, tensor_rank: int) -> bool:
    """Whether this rank's gradient of it goes into the norm: no copy of what another rank counts."""
    if getattr(param, "shared", False):
        return False
    return tensor_rank == 0 or bool(getattr(param, "tensor_model_parallel", False))
