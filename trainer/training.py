"""The training state: model, optimizer and data of one rank; it takes steps and goes into checkpoints and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from eval_service.contract.errors import ConfigError
from trainer import conversion
from trainer.architecture import FIELD, Architecture
from trainer.checkpoint import FIELD as SAVE_FIELD
from trainer.checkpoint import CheckpointStore
from trainer.config import TrainSection
from trainer.data import Batch, Dataset, micro_batches
from trainer.mcore import get_forward_backward_func, quiet
from trainer.model import Model, build_model
from trainer.optim import Optimizer
from trainer.parallel import rank_label


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
    model: Model
    optimizer: Optimizer

    def step(self, step: int, dataset: Dataset) -> StepResult:
        """Train step `step` (from 1)."""
        examples = dataset.of_step(step)
        self.optimizer.zero_grad()
        with quiet():
            losses = get_forward_backward_func()(
                forward_step_func=_forward,
                data_iterator=micro_batches(examples, self.config.micro_batch_size),
                model=[self.model.ddp],
                num_microbatches=len(examples) // self.config.micro_batch_size,
                seq_length=max(len(example.token_ids) for example in examples) - 1,
                micro_batch_size=self.config.micro_batch_size,
            )
        rate, norm = self.optimizer.step(step)
        tokens = sum(int(entry["tokens"]) for entry in losses)
        return StepResult(sum(float(entry["loss"]) for entry in losses) / max(tokens, 1), rate, norm, tokens)

    def save(self, step: int, store: CheckpointStore) -> Path:
        """Publish a checkpoint of now."""
        state = {
            "step": step,
            "model": {name: param.detach() for name, param in self.model.gpt.named_parameters()},
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }
        return store.save(step, rank_label(), state)

    def load(self, step: int, store: CheckpointStore) -> None:
        """Go on from a checkpoint.

        Raises:
            ConfigError: it can't be read, or is of another model.
        """
        state = store.load(step, rank_label())
        try:
            load_parameters(self.model, state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])
        except (KeyError, ValueError, RuntimeError) as exc:
            raise ConfigError(
                f"the checkpoint of step {step} is of another model or optimizer: {exc}",
                field=SAVE_FIELD,
                hint="name another directory, or set train.resume = false",
            ) from exc


def build_training(architecture: Architecture, hf_path: Path, config: TrainSection) -> Training:
    """Model and optimizer at step 0, with the weights of a Hugging Face directory."""
    model = build_model(architecture)
    state = conversion.to_megatron(read_weights(hf_path), architecture)
    try:
        load_parameters(model, state)
    except (RuntimeError, KeyError) as exc:
        raise ConfigError(f"weights and config.json disagree: {exc}", field=FIELD, hint="is it complete?") from exc
    return Training(config, model, Optimizer(model.ddp, config))


def read_weights(hf_path: Path) -> dict[str, Tensor]:
    """All tensors of a directory's safetensors files, by name."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(hf_path.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


@torch.no_grad()
def load_parameters(model: Model, state: dict[str, Tensor]) -> None:
    """Copy into the parameters, in their dtype; names and shapes must be the same.

    Raises:
        KeyError: a parameter that is missing.
        RuntimeError: a shape that differs.
    """
    for name, param in model.gpt.named_parameters():
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
