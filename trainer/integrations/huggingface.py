"""`EvalfleetCallback` for `transformers.Trainer` and everything built on it, TRL's trainers among them.

A point is made after the host has saved the step, with the step's own weights: before the next step begins, or, at the
last step, before the host may put its best checkpoint in their place.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainer.integrations.evaluations import Evaluations
from trainer.integrations.model import weights_of


class EvalfleetCallback(TrainerCallback):
    """Evaluates checkpoints of a run while it trains.

    Args:
        evaluations: made by hand; None: made of `keys`.
        keys: run, root, url, interval, suites, and whatever else `[eval]` has; `base` names a base model's directory.

    As a context manager around `train()` it drains after an exception too; without, Python's exit does.
    """

    def __init__(self, evaluations: Evaluations | None = None, **keys: Any) -> None:
        self.evaluations = evaluations or Evaluations(**keys)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Announce the run, and evaluate the base model or the step resumed from."""
        if not state.is_world_process_zero:
            return
        near = self.evaluations.settings.eval.buffer == "device"
        weights = weights_of(kwargs["model"], kwargs.get("processing_class"), near=near)
        self.evaluations.start(weights, step=state.global_step, num_steps=state.max_steps)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Evaluate the step before, which the host has saved if it was to."""
        self.evaluations.evaluate(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tell the step."""
        self.evaluations.at_step(state.global_step)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Evaluate the last step here where its weights will be gone at the end."""
        last = control.should_training_stop or state.global_step >= state.max_steps
        if args.load_best_model_at_end and last:
            self.evaluations.evaluate(state.global_step, final=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Evaluate the last step, always, and drain."""
        other = args.load_best_model_at_end and state.best_global_step not in (None, state.global_step)
        if other and self.evaluations.under_way:
            self.evaluations.skip(state.global_step, f"the weights are those of step {state.best_global_step} by now")
        self.evaluations.end(None if other else state.global_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.evaluations.end()
