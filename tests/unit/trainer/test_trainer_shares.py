"""A flat share of a tensor is made up of boxes: each element in exactly one, in the share's own order."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.arena import HostArena
from trainer.sharding import HostCopies
from trainer.shares import boxes


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), st.data())
def test_a_share_is_covered_by_boxes_in_its_own_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    tensor = torch.arange(size).view(shape)
    found: list[int] = []
    for box in boxes(shape, start, stop):
        part = tensor[tuple(slice(at, at + by) for at, by in zip(box.offset, box.size, strict=True))]
        assert part.flatten().tolist() == list(range(box.start, box.start + math.prod(box.size)))
        found += part.flatten().tolist()
    assert found == list(range(start, stop))


@pytest.mark.parametrize(("start", "stop", "count"), [(3, 7, 1), (3, 47, 3), (10, 40, 1), (0, 15, 2)])
def test_a_matrix_takes_three_boxes_at_most(start: int, stop: int, count: int) -> None:
    assert len(list(boxes((5, 10), start, stop))) == count


def test_copies_are_made_in_the_same_memory_each_time_and_are_what_the_tensors_were() -> None:
    copies = HostCopies(torch.device("cpu"))
    copies.reserve([400, 4, 100])
    reserved = copies.size_bytes
    for value in (1.0, 2.0):
        tensor = torch.full((100,), value)
        taken = copies.of({"a": [_whole("a", tensor)], "b": {"c": _whole("c", torch.full((1,), value))}})
        tensor.zero_()
        assert taken["a"][0].data.tolist() == [value] * 100
        assert taken["b"]["c"].data.tolist() == [value]
    assert copies.size_bytes == reserved


def test_what_is_left_of_a_block_goes_to_the_next_that_it_holds() -> None:
    arena = HostArena(pinned=False)
    rooms = [arena.room(size) for size in (100 << 20, 20 << 20, 7, 3)]
    assert arena.size_bytes == 164 << 20  # the first by itself, the others in one block
    for number, room in enumerate(rooms):
        room.fill_(number)
    assert [int(room[-1]) for room in rooms] == [0, 1, 2, 3]
    assert all(room.data_ptr() % 64 == 0 for room in rooms)


def _whole(key: str, tensor: torch.Tensor) -> object:
    from trainer.mcore import ShardedTensor

    return ShardedTensor.from_rank_offsets(key, tensor)
