"""What the ranks beside the first one do with an order that fails: the export is lost, training is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from eval_service.contract.manifest import Canary
from eval_service.contract.snapshot import SnapshotWriter
from trainer.background import Background
from trainer.stager import Order, Stager
from trainer.weights import ExportFailed

_Value = TypeVar("_Value")


class Failing:
    """Weights whose forward pass finds no memory."""

    def here(self) -> AbstractContextManager[None]:
        return nullcontext()

    def stage(self) -> None:
        pass

    def canary(self) -> Canary | None:
        raise RuntimeError("CUDA out of memory")

    def fill(self, writer: SnapshotWriter) -> None:
        pytest.fail("nothing was staged")


@dataclass
class Second:
    """The channel of rank 1: what rank 0 broadcasts is given."""

    orders: Iterator[Any]
    rank: int = 1

    def broadcast(self, value: Any) -> Any:
        return next(self.orders)

    def gather(self, value: _Value) -> list[_Value]:
        return [value, value]

    def all(self, flag: bool) -> bool:
        return flag

    def any(self, flag: bool) -> bool:
        return flag


def test_a_forward_pass_that_fails_on_all_ranks_ends_the_export_and_no_ranks_training(tmp_path: Path) -> None:
    order = Order(tmp_path, "r", 1, "ab" * 16, 1.0)
    background = Background()
    Stager(Failing(), Second(iter([order, None])), background).follow()
    assert background.acquire(0.0), "the buffer was given back"
    background.release()
    first = Second(iter([order]), rank=0)
    with pytest.raises(ExportFailed, match="out of memory"):
        Stager(Failing(), first, background).stage(order.writer(), 1.0)
