"""The training state: this rank's model, optimizer and data; it takes steps and goes into checkpoints and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from eval_service.contract.errors import ConfigError
from trainer import conversion
from trainer.architecture import FIELD, Architecture
from trainer.checkpoint import FIELD as SAVE_FIELD
from trainer.checkpoint import CheckpointStore
from trainer.config import ParallelSection, TrainSection
from trainer.data import Batch, Example, collate
from trainer.debug_data import Batches
from trainer.mcore import get_forward_backward_func, quiet
from trainer.model import Model, build_model
from trainer.optim import Optimizer, build_optimizer
from trainer.parallel import Ranks, rank_label, share_of


@dataclass(frozen=True, slots=True)
class StepResult:
    """`loss` is the mean over the learnt tokens of the whole batch, in nats; `grad_norm` is before clipping."""

    loss: float
    rate: float
    grad_norm: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Training:
    """Everything that a step changes."""

    config: TrainSection
    parallel: ParallelSection
    model: Model
    optimizer: Optimizer

    def step(self, step: int, dataset: Batches) -> StepResult:
        """Train step `step` (from 1). Collective."""
        examples = share_of(dataset.of_step(step), self.model.place)
        size = self.config.micro_batch_size
        length = self._length(dataset.of_step(step))
        self.model.ddp.zero_grad_buffer()
        with quiet():
            losses = get_forward_backward_func()(
                forward_step_func=_forward,
                data_iterator=self._batches(examples, length),
                model=[self.model.ddp],
                num_microbatches=len(examples) // size,
                seq_length=length,
                micro_batch_size=size,
            )
        rate, norm = self.optimizer.step(step)
        loss, tokens = self._total(losses)
        return StepResult(loss / max(tokens, 1), rate, norm, int(tokens))

    def _length(self, examples: list[Example]) -> int:
        """Tokens of a row, the same for every micro-batch, as pipeline stages and sequence parallelism want it."""
        multiple = self.parallel.tensor if self.parallel.sequence_parallel else 1
        longest = max(len(example.token_ids) for example in examples) - 1
        return -(-longest // multiple) * multiple

    def _batches(self, examples: Any, length: int) -> Iterator[Batch]:
        for first in range(0, len(examples), self.config.micro_batch_size):
            batch = collate(examples[first : first + self.config.micro_batch_size], length=length)
            yield batch.to(self.model.ranks.device)

    def _total(self, losses: list[dict[str, Tensor]]) -> tuple[float, float]:
        """Summed loss and tokens of the whole batch, from the ranks that know a share of it."""
        place = self.model.place
        knows = place.last_stage and place.tensor == 0
        mine = torch.zeros(2, dtype=torch.float64)
        if knows:
            mine[0] = torch.stack([entry["loss"] for entry in losses]).double().sum().cpu()
            mine[1] = torch.stack([entry["tokens"] for entry in losses]).double().sum().cpu()
        total = self.model.ranks.main.sum(mine)
        return float(total[0]), float(total[1])

    def save(self, step: int, store: CheckpointStore) -> Path:
        """Publish a checkpoint of now. Collective."""
        state = {
            "step": step,
            "model": {name: param.detach() for name, param in self.model.parameters().items()},
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }
        saves = self.optimizer.sharded or self.model.place.data == 0
        return store.save(step, self._label() if saves else None, state, self.model.ranks.main)

    def _label(self) -> str:
        """Names this rank's part of the checkpoint."""
        return rank_label() + (f"_dp{self.model.place.data:02d}" if self.optimizer.sharded else "")

    def load(self, step: int, store: CheckpointStore) -> None:
        """Go on from a checkpoint.

        Raises:
            ConfigError: it can't be read, or is of another model.
        """
        state = store.load(step, self._label())
        try:
            _load_parameters(self.model.parameters(), state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])
        except (KeyError, ValueError, RuntimeError) as exc:
            raise ConfigError(
                f"the checkpoint of step {step} is of another model or optimizer: {exc}",
                field=SAVE_FIELD,
                hint="name another directory, or set train.resume = false",
            ) from exc


def build_training(
    architecture: Architecture,
    hf_path: Path,
    config: TrainSection,
    ranks: Ranks,
    parallel: ParallelSection | None = None,
) -> Training:
    """Model and optimizer at step 0, with the weights of a Hugging Face directory."""
    parallel = parallel or ParallelSection()
    model = build_model(architecture, ranks, parallel, config.dtype)
    load_hf(model, hf_path)
    return Training(config, parallel, model, build_optimizer(model, config))


def load_hf(model: Model, hf_path: Path) -> None:
    """Fill a model from a directory's safetensors files; no more than one megatron tensor is held at a time.

    Raises:
        ConfigError: a tensor is missing, foreign, or of another shape.
    """
    with ExitStack() as stack:
        held: dict[str, Any] = {}
        for path in sorted(hf_path.glob("*.safetensors")):
            file = stack.enter_context(safe_open(path, framework="pt"))
            held.update(dict.fromkeys(file.keys(), file))
        conversion.check_names(held, model.architecture)
        for rule in conversion.rules_of(model.architecture):
            _load_rule(model, rule, held)


def _load_rule(model: Model, rule: conversion.Rule, held: Mapping[str, Any]) -> None:
    try:
        tensors = [held[name].get_tensor(name) for name in rule.hf]
        model.load(rule, rule.join(tensors, model.architecture))
    except RuntimeError as exc:
        raise ConfigError(f"weights and config.json disagree: {exc}", field=FIELD, hint="is it complete?") from exc


@torch.no_grad()
def _load_parameters(params: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    for name, param in params.items():
        if state[name].shape != param.shape:
            raise RuntimeError(f"{name} is {tuple(state[name].shape)}, not {tuple(param.shape)}")
        param.copy_(state[name])


def _forward(batches: Iterator[Batch], ddp: Any) -> tuple[Tensor, Any]:
    batch = next(batches)
    losses = ddp(batch.token_ids, batch.position_ids, None, labels=batch.labels)
    return losses, partial(_loss, batch.loss_mask)


def _loss(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron divides the gradients by the tokens of the whole batch, so the sum is handed over."""
    total = (losses.float() * mask).sum()
    tokens = mask.sum().to(torch.int)
    return total, tokens, {"loss": total.detach(), "tokens": tokens}
