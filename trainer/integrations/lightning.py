"""`EvalfleetCallback` for Lightning, whose modules hold a Hugging Face model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from trainer.integrations.evaluations import Evaluations
from trainer.integrations.model import weights_of


class EvalfleetCallback(Callback):
    """Evaluates checkpoints of a run while it trains.

    Args:
        model: finds the Hugging Face model in the module.
        tokenizer: saved with each snapshot.
        evaluations: made by hand; None: made of `keys`.
        keys: run, root, url, interval, suites, and whatever else `[eval]` has; `base` names a base model's directory.
    """

    def __init__(
        self,
        model: Callable[[Any], nn.Module] = lambda module: module.model,
        tokenizer: Any = None,
        evaluations: Evaluations | None = None,
        **keys: Any,
    ) -> None:
        self.evaluations = evaluations or Evaluations(**keys)
        self._model = model
        self._tokenizer = tokenizer

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Announce the run, and evaluate the base model or the step resumed from."""
        if not trainer.is_global_zero:
            return
        steps = trainer.estimated_stepping_batches
        near = self.evaluations.settings.eval.buffer == "device"
        weights = weights_of(self._model(pl_module), self._tokenizer, near=near)
        num_steps = None if math.isinf(steps) else int(steps)
        self.evaluations.start(weights, step=trainer.global_step, num_steps=num_steps)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Evaluate the step before, which the host has saved if it was to."""
        self.evaluations.evaluate(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tell the step."""
        self.evaluations.at_step(trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the last step, always, and drain."""
        self.evaluations.end(trainer.global_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Drain what there is."""
        self.evaluations.end()
