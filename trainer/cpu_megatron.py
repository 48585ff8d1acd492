"""Megatron-core without CUDA: what it asks of `torch.cuda` by name is answered by the CPU.

Invariants: does nothing where CUDA is there; `torch` itself is left as it is. Only the few megatron modules that name
the device see a stand-in for their own global `torch`, which passes everything on but the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainer import mcore

_CPU = torch.device("cpu")
# Rotary tables, the schedules' token counter, the gradient buffers, what pipeline and tensor parallel ranks exchange.
_MODULES: tuple[ModuleType, ...] = (
    mcore.rotary_pos_embedding,
    mcore.schedules,
    mcore.param_and_grad_buffer,
    mcore.p2p_communication,
    mcore.tensor_parallel_layers,
    mcore.tensor_parallel_mappings,
    mcore.megatron_utils,
)


def install() -> bool:
    """Answer megatron's questions for a CUDA device with the CPU; tells whether it was needed. Safe to call again."""
    if torch.cuda.is_available():
        return False
    for module in _MODULES:
        if not isinstance(module.__dict__["torch"], _TorchOnCpu):
            module.__dict__["torch"] = _TorchOnCpu()
    # Nothing here draws from the CUDA generators that these would fork, save and put back.
    tracker = mcore.tensor_parallel_random.get_cuda_rng_tracker()
    tracker.fork = lambda *_: nullcontext()
    random = mcore.tensor_parallel_random.__dict__
    random["_get_cuda_rng_state"] = lambda *_, **__: torch.empty(0)
    random["_set_cuda_rng_state"] = lambda *_, **__: None
    return True


@contextmanager
def building() -> Iterator[None]:
    """While a model is built: `tensor.cuda()` is the tensor itself (a tied head's set-up under pipeline parallel)."""
    if torch.cuda.is_available():
        yield
        return
    with _StayOnCpu():
        yield


class _StayOnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.cuda else func(*args, **(kwargs or {}))


class _CudaOnCpu:
    """`torch.cuda`, whose current device is the CPU."""

    def synchronize(self) -> None:
        """Nothing runs behind."""

    def current_device(self) -> torch.device:
        return _CPU

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _TorchOnCpu:
    """`torch`, whose factories take `device="cuda"` for the CPU."""

    cuda = _CudaOnCpu()

    def zeros(self, *size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, device=_CPU if device == "cuda" else device, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
