"""A flat share of a parameter, such as the distributed optimizer cuts them, in megatron's sharded form.

Invariant: a checkpoint knows boxes of a tensor alone, so a share goes into it as the boxes that make it up (two partial
rows and the whole ones between them, of a matrix). Each rank names its own and needs nothing of the others; what is
on disk is one tensor for each parameter, whoever wrote which part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from trainer.mcore import ShardedTensor, ShardedTensorFactory, nested_values


@dataclass(frozen=True, slots=True)
class Box:
    """`offset` and `size` by axis; `start` is where it begins in the flat tensor, row by row."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """What makes up the elements `start` to `stop` of a tensor of one axis or more, in order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield Box((start,), (stop - start,), start)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), first * row)
    yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    begin = row * math.prod(shape[1:])
    for box in boxes(shape[1:], start - begin, stop - begin):
        yield Box((row, *box.offset), (1, *box.size), box.start + begin)


def share_shards(
    param: ShardedTensor | ShardedTensorFactory, start: int, share: Tensor, prefix: str
) -> list[ShardedTensor]:
    """The shards of a tensor that goes with a parameter, element by element, of which this rank has a share.

    Args:
        param: the parameter's own, its data included.
        start: where the share begins in the parameter, flat.
        share: float, [elements of the share]; what is returned are views of it.
        prefix: of the tensor's key.
    """
    found = []
    for whole in _wholes(param):
        # A factory cuts a parameter into parts that lie in its memory one after the other, such as gate and up.
        begin = whole.data.storage_offset() - param.data.storage_offset()
        low, high = max(start, begin), min(start + share.numel(), begin + whole.data.numel())
        for box in boxes(tuple(whole.local_shape), low - begin, high - begin):
            at = begin + box.start - start
            found.append(_boxed(whole, box, share[at : at + math.prod(box.size)], prefix))
    return found


def _wholes(param: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    wholes = list(nested_values(param.build())) if isinstance(param, ShardedTensorFactory) else [param]
    assert all(whole.data.is_contiguous() for whole in wholes)
    return wholes


def _boxed(whole: ShardedTensor, box: Box, data: Tensor, prefix: str) -> ShardedTensor:
    return replace(
        whole,
        key=f"{prefix}.{whole.key}",
        data=data.view(box.size),
        dtype=data.dtype,
        local_shape=box.size,
        global_offset=tuple(at + by for at, by in zip(whole.global_offset, box.offset, strict=True)),
        axis_fragmentations=None,  # boxes of any size
        replica_id=(*whole.replica_id[:-1], 0),  # no other data-parallel rank has it
    )
