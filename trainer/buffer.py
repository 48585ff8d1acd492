"""The one copy that a step waits for: parameters into a buffer of host memory that was allocated before training.

Invariant: the buffer is pinned where there is CUDA and touched once everywhere, so that no step pays for its pages.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor


class HostBuffer:
    """Room for tensors of these names and shapes, in one dtype."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        total = sum(tensor.numel() for tensor in tensors.values())
        self.on_device = any(tensor.is_cuda for tensor in tensors.values())
        self.flat = torch.empty(total, dtype=dtype, pin_memory=self.on_device)
        self.flat.zero_()
        self.views = _views(self.flat, tensors)

    @property
    def size_bytes(self) -> int:
        """Host memory that it takes."""
        return self.flat.numel() * self.flat.element_size()

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the tensors as they are now; when this returns they may change."""
        for name, view in self.views.items():
            tensor = tensors[name]
            if self.on_device:
                # Converted where it lies: the way to pinned memory is taken once, by the bytes that are kept.
                view.copy_(tensor.to(view.dtype), non_blocking=True)
            elif tensor.dtype is view.dtype and tensor.is_contiguous():
                # torch would gather its threads for each of hundreds of tensors; one memmove fills the memory bus.
                ctypes.memmove(view.data_ptr(), tensor.data_ptr(), view.nbytes)
            else:
                view.copy_(tensor)
        if self.on_device:
            torch.cuda.current_stream().synchronize()


def _views(flat: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    views, at = {}, 0
    for name, tensor in tensors.items():
        views[name] = flat[at : at + tensor.numel()].view(tensor.shape)
        at += tensor.numel()
    return views
