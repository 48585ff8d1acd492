"""What waits on the host between steps: the bytes come back, whatever happened meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainer.offload import Offload, PlainMemory


class CountingMemory(PlainMemory):
    """Counts, and has room for so many bytes of the host."""

    def __init__(self) -> None:
        self.given_back = 0
        self.asked: list[int] = []

    def host(self, size_bytes: int) -> Tensor:
        self.asked.append(size_bytes)
        return super().host(size_bytes)

    def give_back(self) -> None:
        self.given_back += 1


def held(*tensors: Tensor) -> int:
    """Bytes behind tensors."""
    return sum(tensor.untyped_storage().size() for tensor in tensors)


def test_what_waits_takes_no_memory_and_comes_back_as_it_was() -> None:
    buffer, grad, memory = torch.arange(8.0), torch.ones(8), CountingMemory()
    views = [buffer[:3], buffer[3:].view(1, 5)]  # as megatron's parameters are
    offload = Offload(lambda: views, lambda: [grad], memory)
    for _ in range(2):
        with offload.here():
            with offload.here():
                assert held(buffer, grad) == 64
            assert buffer.tolist() == list(range(8))
            assert held(buffer, grad) == 64
        assert held(buffer, grad) == 0
    assert memory.asked == [32]  # once, for what two tensors share; none for gradients
    assert memory.given_back == 2
    with offload.here():
        assert views[1].tolist() == [[3.0, 4.0, 5.0, 6.0, 7.0]]


def fails(tensor: Tensor) -> None:
    """What needs it, and does not come to its end."""
    tensor.add_(1)
    raise OSError("disk full")


def test_it_is_put_away_whatever_ends_the_use() -> None:
    tensor = torch.arange(4.0)
    offload = Offload(lambda: [tensor], list, CountingMemory())
    with pytest.raises(OSError, match="disk full"), offload.here():
        fails(tensor)
    assert held(tensor) == 0
    with offload.here():
        assert tensor.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_tensors_that_an_optimizer_makes_later_wait_too() -> None:
    tensors = [torch.ones(2)]
    offload = Offload(lambda: tensors, list, CountingMemory())
    with offload.here():
        pass
    with offload.here():
        tensors.append(torch.full((3,), 2.0))
    assert held(*tensors) == 0
    with offload.here():
        assert tensors[1].tolist() == [2.0, 2.0, 2.0]
