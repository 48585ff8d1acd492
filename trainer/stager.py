"""Exports as all ranks see them: rank 0 orders, every rank agrees before anything collective, the rest is background.

Invariant: an order is broadcast before its buffer is waited for, and nobody copies unless every rank has its buffer; so
ranks never part ways, whatever one of them meets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from eval_service.contract.manifest import Canary
from eval_service.contract.snapshot import Published, SnapshotWriter
from trainer.background import Background
from trainer.weights import ExportFailed, Weights, exporter_name

_Value = TypeVar("_Value")


class Channel(Protocol):
    """How the ranks agree (`trainer.parallel.Channel`); every method is collective."""

    @property
    def rank(self) -> int:
        """This process among the others."""

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, everywhere."""

    def gather(self, value: _Value) -> list[_Value]:
        """Every rank's value, by rank, everywhere."""

    def all(self, flag: bool) -> bool:
        """Whether it is true on every rank."""

    def any(self, flag: bool) -> bool:
        """Whether it is true on some rank."""


@dataclass(frozen=True, slots=True)
class Order:
    """What rank 0 wants exported, and how long the buffer may be waited for."""

    root: Path
    run: str
    step: int
    nonce: str
    timeout_s: float

    def writer(self) -> SnapshotWriter:
        """Of this rank's part; only rank 0 may abort or publish it."""
        return SnapshotWriter(self.root, self.run, self.step, exporter_name(), nonce=self.nonce)


@dataclass(frozen=True, slots=True)
class Staged:
    """Weights in the buffers of all ranks. `copy_s` is the one copy, `canary_s` the forward pass."""

    writer: SnapshotWriter
    canary: Canary | None
    copy_s: float
    canary_s: float


@dataclass(slots=True)
class Stager:
    """One a rank."""

    weights: Weights
    channel: Channel
    background: Background
    clock: Callable[[], float] = time.monotonic

    @contextmanager
    def led(self) -> Iterator[None]:
        """Around what rank 0 decides in: the other ranks do what it orders, until it has left."""
        if self.channel.rank:
            yield
            self.follow()
            return
        try:
            yield
        finally:
            self.channel.broadcast(None)

    # --- rank 0

    def stage(self, writer: SnapshotWriter, timeout_s: float) -> Staged | None:
        """Copy the weights of now, on all ranks; None: some rank's buffer was busy to the deadline.

        What is staged is written with `submit`, which must follow.

        Raises:
            ExportFailed: some rank could not copy.
        """
        order = Order(writer.root, writer.run, writer.step, writer.nonce, timeout_s)
        self.channel.broadcast(order)
        return self._stage(order, writer)

    def submit(self, job: Callable[[], None]) -> None:
        """Have `job` write what was staged, behind; it calls `weights.fill` exactly once, and raises nothing."""
        self.background.submit(job)

    def publish_now(self, root: Path, run: str, step: int) -> Published:
        """Export and wait for it; the same weights again are the same directory.

        Raises:
            ExportFailed: some rank could not write, or its buffer was never free.
            OSError: as the file system has it; what was written of it is removed.
        """
        writer = SnapshotWriter(root, run, step, exporter_name())
        staged = self.stage(writer, timeout_s=3600.0)
        if staged is None:
            raise ExportFailed("the buffer was never free")
        outcome: list[Published | Exception] = []

        def job() -> None:
            try:
                with ExitStack() as stack:
                    stack.push(writer)
                    self.weights.fill(writer)
                    outcome.append(writer.publish(canary=staged.canary, dispatch=()))
            except Exception as exc:  # noqa: BLE001 - the edge: raised where it is waited for
                outcome.append(exc)

        self.submit(job)
        self.background.join()
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    # --- the others

    def follow(self) -> None:
        """Do what rank 0 orders, until it has no more."""
        order: Order | None
        while (order := self.channel.broadcast(None)) is not None:
            with suppress(ExportFailed):  # rank 0 has been told, and records it
                if staged := self._stage(order, order.writer()):
                    self.background.submit(partial(self._fill_quietly, staged.writer))

    def _fill_quietly(self, writer: SnapshotWriter) -> None:
        with suppress(ExportFailed):
            self.weights.fill(writer)

    # --- all

    def _stage(self, order: Order, writer: SnapshotWriter) -> Staged | None:
        acquired = self.background.acquire(order.timeout_s)
        if not self.channel.all(acquired):
            if acquired:
                self.background.release()
            return None
        try:
            return self._copy(writer)
        except BaseException:
            self.background.release()
            raise

    def _copy(self, writer: SnapshotWriter) -> Staged:
        with ExitStack() as stack:
            began = self.clock()
            fault = self._attempt(stack)
            copied = self.clock()
            faults = [f"rank {rank}: {found}" for rank, found in enumerate(self.channel.gather(fault)) if found]
            if faults:
                raise ExportFailed(faults[0])
            before_canary = self.clock()
            try:
                canary = self.weights.canary()
            except Exception as exc:
                raise ExportFailed(f"the canary: {type(exc).__name__}: {exc}") from exc
            return Staged(writer, canary, copied - began, self.clock() - before_canary)

    def _attempt(self, stack: ExitStack) -> str | None:
        try:
            stack.enter_context(self.weights.here())
            self.weights.stage()
        except Exception as exc:  # noqa: BLE001 - the edge: every rank is told
            return f"{type(exc).__name__}: {exc}"
        return None
