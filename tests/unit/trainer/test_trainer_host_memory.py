"""Host memory of exactly the size that is asked for, and what CUDA is told of it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from trainer.host_memory import host_memory


class Runtime:
    """CUDA's runtime, as far as pinning goes; refuses with `code`."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert flags == 0
        if self.code == 0:
            self.pinned[address] = size_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        del self.pinned[address]
        return 0


def test_what_the_host_does_not_have_is_refused_as_torch_would() -> None:
    with pytest.raises(RuntimeError, match=r"there are no 1,152,921,504,607 MB of host memory: Cannot allocate memory"):
        host_memory(1 << 60, pinned=False)


def _flags(address: int) -> list[str]:
    """The kernel's of the mapping that begins there."""
    maps = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(f"{address:x}-") for line in maps)
    return next(line for line in maps if line.startswith("VmFlags:")).split()


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, 5_000_001])
def test_it_is_as_large_as_asked_and_zero(size_bytes: int) -> None:
    memory = host_memory(size_bytes, pinned=False)
    assert (memory.dtype, tuple(memory.shape)) == (torch.uint8, (size_bytes,))
    assert memory.data_ptr() % 64 == 0
    assert not memory.any()


def test_it_is_pinned_whole_until_the_last_view_of_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = host_memory(10_000, pinned=True)
    assert runtime.pinned == {memory.data_ptr(): 10_000}
    assert "dc" in _flags(memory.data_ptr()), "a child that is forked has none of it"
    view = memory.view(torch.bfloat16)[3:5]
    del memory
    gc.collect()
    view.fill_(1.0)
    assert len(runtime.pinned) == 1
    del view
    gc.collect()
    assert runtime.pinned == {}


def test_what_cuda_would_not_pin_is_refused_with_its_size_and_kept_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(code=2))
    with pytest.raises(RuntimeError, match=r"would not pin 3 MB of host memory \(cudaError 2\)"):
        host_memory(3_000_000, pinned=True)
