"""A run that another trainer trains: it says which step it is at, and points are made as in our own.

Invariants: `start` may refuse, by name, what can't work; after it nothing here raises for evaluation's sake. A point's
weights are those of the call: what a step waits for is one copy of them and the canary's forward pass.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from eval_service.contract.client import EvalClient
from eval_service.contract.errors import ConfigError
from eval_service.contract.wire import Kind, Receipt
from trainer import cadence
from trainer.background import Background
from trainer.cadence import Point
from trainer.drain import drain, summary
from trainer.eval_hook import EvalHook
from trainer.integrations.settings import HINT, Settings, settings
from trainer.service_link import ServiceLink, token_of
from trainer.stager import Stager
from trainer.steplog import StepLog
from trainer.weights import Weights

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Alone:
    """The channel of one rank: under data parallelism rank 0 holds all of the model, and asks nobody."""

    rank: int = 0
    world: int = 1

    def broadcast(self, value: Any) -> Any:
        """Its own."""
        return value

    def gather(self, value: _Value) -> list[_Value]:
        """Its own."""
        return [value]

    def all(self, flag: bool) -> bool:
        """Its own."""
        return flag

    def any(self, flag: bool) -> bool:
        """Its own."""
        return flag


class Evaluations:
    """Evaluates points of a run; made on every rank, used on rank 0.

    Args:
        keys: as `settings` takes them.
        connect: makes the client of a URL, for tests.
    """

    def __init__(self, *, connect: Callable[..., EvalClient] = EvalClient, **keys: Any) -> None:
        self.settings: Settings = settings(**keys)
        self.receipt: Receipt | None = None
        self._connect = connect
        self._under_way: _UnderWay | None = None

    @property
    def under_way(self) -> bool:
        """Begun, and not yet ended."""
        return self._under_way is not None

    def start(self, weights: Callable[[bool], Weights], *, step: int = 0, num_steps: int | None = None) -> None:
        """Make the run known, say the plan, and evaluate what comes before the next step.

        Args:
            weights: gives the model's weights; told whether a canary is wanted.
            step: that is completed: 0 for a fresh run.
            num_steps: the last step; None where it is not known.

        Raises:
            ConfigError: the service refuses the run, its directory can't be written, or the model can't be exported.
        """
        self.end()
        if not self.settings.eval.enabled:
            return
        self._under_way = _UnderWay(self.settings.of_run(num_steps), weights, self._connect)
        atexit.register(self.end)
        self._under_way.before_training(step)

    def step(self, step: int) -> None:
        """A step is completed: tell it, and evaluate it if it is due."""
        self.at_step(step)
        self.evaluate(step)

    def at_step(self, step: int) -> None:
        """A step is completed; only told."""
        if self._under_way is not None:
            self._under_way.hook.link.at_step(step)

    def is_due(self, step: int) -> bool:
        """Whether the cadence has a point at this step that was not made yet."""
        return self._under_way is not None and self._under_way.is_due(step)

    def evaluate(self, step: int, *, final: bool = False) -> None:
        """Evaluate the weights of now as a step's, if it is due or the last one, and was not evaluated yet."""
        if self._under_way is not None:
            self._under_way.evaluate(step, final=final)

    def skip(self, step: int, why: str) -> None:
        """The step has no point, for a reason that goes into the log."""
        if self._under_way is not None:
            self._under_way.log.write("eval_skipped", step=step, detail=why)

    def end(self, step: int | None = None) -> Receipt | None:
        """Evaluate the last step (None: it has a point already, or never will), and drain. Does nothing twice."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            atexit.unregister(self.end)
            self.receipt = under_way.end(step)
            print(f"evalfleet: {summary(self.receipt)}", flush=True)
        return self.receipt

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


class _UnderWay:
    """From `start` to `end`."""

    def __init__(
        self, config: Settings, weights: Callable[[bool], Weights], connect: Callable[..., EvalClient]
    ) -> None:
        self._config = config
        section = config.eval
        assert section.url is not None  # an interval needs it
        self._made: set[int] = set()
        stager = Stager(weights(section.canary), Alone(), Background())
        try:
            self.log = StepLog(config.output_dir / "steps.jsonl")
        except OSError as exc:
            raise ConfigError(
                f"{exc.filename} can't be written: {exc.strerror}", field="output_dir", hint=HINT
            ) from exc
        with ExitStack() as unless_begun:
            unless_begun.callback(self.log.close)
            token = token_of(section)
            self._client = connect(section.url) if token is None else connect(section.url, token=token)
            unless_begun.callback(self._client.close)
            link = ServiceLink(config, self._client, self.log)
            link.check()
            unless_begun.pop_all()
        self.hook = EvalHook(config, link, self.log, stager)

    def before_training(self, start: int) -> None:
        config, section = self._config, self._config.eval
        self.log.write("start", start=start, num_steps=config.num_steps, resumed=start > 0)
        self.hook.link.start(start)
        self._made.add(start)  # it comes before training, or `skip_eval_before_train` leaves it out
        if config.num_steps is not None:
            points = cadence.plan(
                start=start,
                num_steps=config.num_steps,
                interval=section.interval,
                steps_per_epoch=None,
                skip_eval_before_train=section.skip_eval_before_train,
            )
            print(f"evalfleet: {cadence.describe(points)}", flush=True)
            first = next((point for point in points if point.step == start), None)
        else:
            first = None if section.skip_eval_before_train else Point(start, Kind.BASELINE)
        if first is not None:
            base = config.base if start == 0 else None
            self._hand_over(first, base_given=base is not None, if_lacking=first.kind is Kind.FINAL)
            self.hook.join(section.drain_timeout_s)

    def is_due(self, step: int) -> bool:
        interval, last = self._config.eval.interval, self._config.num_steps
        # Where the last step is not known it is what `end` is told.
        return step not in self._made and cadence.is_due(step, interval, None, last if last is not None else step + 1)

    def evaluate(self, step: int, *, final: bool) -> None:
        final = final or step == self._config.num_steps
        if step not in self._made and (final or self.is_due(step)):
            self._hand_over(Point(step, Kind.FINAL if final else Kind.PERIODIC, force=final))

    def end(self, step: int | None) -> Receipt:
        with self._ended():
            if step is not None:
                self.evaluate(step, final=True)
            return drain(self.hook, output_dir=self._config.output_dir)

    def _hand_over(self, point: Point, *, base_given: bool = False, if_lacking: bool = False) -> None:
        self._made.add(point.step)
        self.hook.evaluate(point, base=self._config.base if base_given else None, if_lacking=if_lacking)

    @contextmanager
    def _ended(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.log.write("teardown", drain_s=time.monotonic() - began)
            self._close()

    def _close(self) -> None:
        self._client.close()
        self.log.close()
