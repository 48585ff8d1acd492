"""The loop: what is evaluated before training, the steps with their saves and points, and what comes after.

Invariants: a point before training is evaluated before the next step begins; a step's save comes before its evaluation;
the last step is always saved; drain comes before teardown, also after an exception or SIGTERM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from eval_service.contract.errors import SnapshotFault
from eval_service.contract.wire import Kind, Source
from trainer.cadence import Point
from trainer.config import RunConfig
from trainer.crash import crash_point
from trainer.debug_data import Batches
from trainer.display import Display
from trainer.drain import drain, summary
from trainer.eval_hook import EvalHook, Given
from trainer.offload import device_bytes
from trainer.saving import CheckpointWriter
from trainer.stager import Stager
from trainer.steplog import StepLog
from trainer.stopping import StopFlag
from trainer.training import Training
from trainer.weights import ExportFailed


@dataclass(frozen=True, slots=True)
class Loop:
    """One launch: from step `start` to the last, with the points of `points`."""

    config: RunConfig
    start: int
    points: tuple[Point, ...]
    log: StepLog
    display: Display
    stop: StopFlag
    hook: EvalHook | None
    stager: Stager | None = None  # None: nothing is trained, so there is one rank and nothing to export

    def before_training(self) -> None:
        """Evaluate what comes before the next step: the base model, the step resumed from, or a last one lacking."""
        for point in self.points:
            if point.step != self.start:
                continue
            base = self.config.model.hf_path if point.step == 0 else None
            self._evaluate(point, base=base, if_lacking=point.kind is Kind.FINAL)
            if self.hook is not None:
                # Not a step's time: once a launch, so that its point is there before the next one's.
                self.hook.join(self.config.eval.drain_timeout_s)

    def _evaluate(self, point: Point, *, base: Path | None = None, if_lacking: bool = False) -> None:
        """Rank 0 decides; the others do their part of whatever is exported."""
        with self.stager.led() if self.stager is not None else nullcontext():
            if self.hook is not None:
                self.hook.evaluate(point, base=base, if_lacking=if_lacking)

    @property
    def _stops(self) -> bool:
        """Some rank was asked to end; every rank asks at the same places."""
        return self.stop.is_set if self.stager is None else self.stager.channel.any(self.stop.is_set)

    def train(self, training: Training, dataset: Batches, saver: Saver) -> None:
        """Train until the last step or a stop."""
        due = {point.step: point for point in self.points}
        for step in range(self.start + 1, self.config.train.num_steps + 1):
            if self._stops:
                self._stopped(step - 1, saver)
                return
            self._train_step(step, training, dataset, saver)
            point = due.get(step)
            if saver.is_due(step, point):
                saver.save(step)
            if point is not None and not self._stops:
                self._evaluate(point)
        saver.writer.finish()

    def _stopped(self, step: int, saver: Saver) -> None:
        self.log.write("stopped", step=step)
        if step > self.start and not saver.has(step):
            saver.save(step)
            saver.writer.finish()

    def _train_step(self, step: int, training: Training, dataset: Batches, saver: Saver) -> None:
        self.log.write("step_begin", step=step)
        crash_point("in_step", step)
        crash_point("settled", step, first=saver.settle)
        result = training.step(step, dataset)
        figures = {"loss": result.loss, "lr": result.rate, "grad_norm": result.grad_norm, "tokens": result.tokens}
        self.log.write("step_end", step=step, **figures, **device_bytes(training.model.ranks.device))
        if self.hook is not None:
            self.hook.link.at_step(step)
        self.display.step(step, result.loss, result.rate)

    @contextmanager
    def drained(self, output_dir: Path) -> Iterator[None]:
        """Drain on the way out, whatever the way, and before anything is torn down."""
        if self.hook is not None:
            self.hook.link.start(self.start)
        try:
            yield
        except BaseException as exc:
            self.log.write("exception", detail=f"{type(exc).__name__}: {exc}")
            raise
        finally:
            self.stop.cuts_waits = False
            if self.hook is not None:
                receipt = drain(self.hook, output_dir=output_dir, on_progress=self.display.draining)
                self.display.say(summary(receipt))
            elif self.stager is not None:
                self.stager.background.join(self.config.eval.drain_timeout_s)


@dataclass(frozen=True, slots=True)
class Saver:
    """Saves checkpoints and, beside them, Hugging Face directories; the latter are what `reuse` evaluates.

    Args:
        data: what decides the order of the data.
    """

    config: RunConfig
    writer: CheckpointWriter
    training: Training
    data: Mapping[str, Any]
    stager: Stager
    log: StepLog
    clock: Callable[[], float]

    def is_due(self, step: int, point: Point | None) -> bool:
        """The interval, the last step, and whatever an evaluation is to reuse."""
        train = self.config.train
        periodic = train.save_interval is not None and step % train.save_interval == 0
        return periodic or step == train.num_steps or (point is not None and self.config.reuses)

    def has(self, step: int) -> bool:
        """It was saved already."""
        self.writer.settle()
        return self.writer.last == step

    def save(self, step: int) -> None:
        """Save a step; what is written behind is over by the next save, or the end. A Hugging Face directory that
        can't be written costs its point, not the run; so does a checkpoint, unless it is the last one."""
        started = self.clock()
        if self.config.train.save_hf:
            self._save_hf(step)
        self.writer.save(step, partial(self.training.state, step, self.data))
        self.log.write("save", step=step, save_s=self.clock() - started)
        crash_point("after_save", step, first=self.settle)

    def settle(self) -> None:
        """Wait for what is written behind."""
        self.writer.settle()
        self.stager.background.join()

    def _save_hf(self, step: int) -> None:
        with self.stager.led():
            if self.stager.channel.rank:
                return
            try:
                self.stager.publish_now(self.writer.store.hf_root, self.config.run.name, step)
            except (OSError, SnapshotFault, ExportFailed) as exc:
                self.log.write("save_hf_failed", step=step, detail=str(exc))

    def given(self, step: int) -> Given:
        """The step's own Hugging Face directory; written now if its save has none. On rank 0, within `led`."""
        started = self.clock()
        published = self.stager.publish_now(self.writer.store.hf_root, self.config.run.name, step)
        export_s = None if published.reused else self.clock() - started
        return Given(published.path, Source.REUSE, published.manifest.digest, export_s)
