"""The one copy that a step waits for: parameters into a buffer that was allocated before training.

Invariant: what is written comes from host memory, pinned where there is CUDA and touched once everywhere, so that no
step pays for its pages. With `near` the step's copy goes to the parameters' own device, which is quicker, and the way
to the host is taken behind.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.host_memory import host_memory

PIECE_BYTES = 16 << 20
_WORTH_THREADS_BYTES = 16 << 20


class HostBuffer:
    """Room for tensors of these names and shapes, in one dtype.

    Args:
        near: hold a second copy on the tensors' device, which is what `copy` fills.
    """

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, *, near: bool = False) -> None:
        total = sum(tensor.numel() for tensor in tensors.values())
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        self.on_gpu = device.type == "cuda"
        self.flat = host_memory(total * dtype.itemsize, pinned=self.on_gpu).view(dtype)
        self.views = _views(self.flat, tensors)
        self._near = torch.zeros(total, dtype=dtype, device=device) if near else None
        self._filled = self.views if self._near is None else _views(self._near, tensors)

    @property
    def size_bytes(self) -> int:
        """Host memory that it takes; with `near`, so much of the device's too."""
        return self.flat.numel() * self.flat.element_size()

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the tensors as they are now; when this returns they may change."""
        if self.on_gpu:
            # Converted where they lie: the way to pinned memory is taken once, by the bytes that are kept.
            for name, view in self._filled.items():
                view.copy_(tensors[name].to(view.dtype), non_blocking=True)
            torch.cuda.current_stream().synchronize()
            return
        _copy_on_host({name: (view, tensors[name]) for name, view in self._filled.items()})

    def settle(self) -> None:
        """Bring what was copied to the host; `views` hold it then. Runs behind, beside training."""
        if self._near is None:
            return
        # Piece by piece: what a step brings to the host itself, a loss or a norm, waits for the copies asked for before
        # it, whatever their stream.
        piece = max(1, PIECE_BYTES // self.flat.element_size())
        with ExitStack() as stack:
            if self.on_gpu:
                stack.enter_context(torch.cuda.device(self._near.device))
                stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))  # type: ignore[no-untyped-call]  # torch leaves it untyped
            for to, source in zip(torch.split(self.flat, piece), torch.split(self._near, piece), strict=True):
                to.copy_(source, non_blocking=True)
                if self.on_gpu:
                    torch.cuda.current_stream().synchronize()


@dataclass(frozen=True, slots=True)
class Move:
    """So many bytes from one address to another."""

    to: int
    source: int
    size: int


def shared_out(moves: Iterable[Move], shares: int) -> list[list[Move]]:
    """The same bytes in so many lists, none of more than its part of them; a move may be cut."""
    moves = list(moves)
    most = -(-sum(move.size for move in moves) // shares)
    found: list[list[Move]] = [[] for _ in range(shares)]
    share, room = 0, most
    for move in moves:
        done = 0
        while done < move.size:
            if room == 0:
                share, room = share + 1, most
            size = min(room, move.size - done)
            found[share].append(Move(move.to + done, move.source + done, size))
            done, room = done + size, room - size
    return found


def _copy_on_host(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    # Torch would gather its threads for each of hundreds of tensors, which takes long where others want the cores too.
    moves = []
    for view, tensor in pairs.values():
        if tensor.dtype is view.dtype and tensor.is_contiguous():
            moves.append(Move(view.data_ptr(), tensor.data_ptr(), view.nbytes))
        else:
            view.copy_(tensor)
    threads = torch.get_num_threads() if sum(move.size for move in moves) >= _WORTH_THREADS_BYTES else 1
    if threads == 1:
        _carry_out(moves)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="copy") as pool:
        list(pool.map(_carry_out, shared_out(moves, threads)))


def _carry_out(moves: Iterable[Move]) -> None:
    for move in moves:
        ctypes.memmove(move.to, move.source, move.size)


def _views(flat: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    views, at = {}, 0
    for name, tensor in tensors.items():
        views[name] = flat[at : at + tensor.numel()].view(tensor.shape)
        at += tensor.numel()
    return views
