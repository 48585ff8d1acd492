"""Parameters, gradients and optimizer wait on the host between steps: an engine on the same GPU has their memory then.

Invariants: what waits has storages of size zero, and every tensor stays the object it was, so who holds one finds it
again; the bytes come back as they went, so losses are the same. Whoever needs them says so with `here`, and they are
put away on the way out, whatever the way. Gradients are not kept: they are of one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.arena import HostArena


class Memory(Protocol):
    """What differs between a GPU and the tests."""

    def host(self, size_bytes: int) -> Tensor:
        """Host memory: uint8, [size_bytes]."""

    def settle(self) -> None:
        """Wait for the copies that were begun."""

    def give_back(self) -> None:
        """Let others have the memory that was freed."""


class CudaMemory:
    """Pinned host memory; freed blocks leave torch's cache."""

    def __init__(self) -> None:
        self._arena = HostArena(pinned=True)

    def host(self, size_bytes: int) -> Tensor:
        """As `Memory.host`."""
        return self._arena.room(size_bytes)

    def settle(self) -> None:
        """As `Memory.settle`."""
        torch.cuda.current_stream().synchronize()

    def give_back(self) -> None:
        """As `Memory.give_back`."""
        torch.cuda.empty_cache()


class PlainMemory:
    """Where the tensors are on the host already, as in tests."""

    def host(self, size_bytes: int) -> Tensor:
        """As `Memory.host`."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def settle(self) -> None:
        """Nothing runs behind."""

    def give_back(self) -> None:
        """A freed storage is freed."""


@dataclass(slots=True)
class _Parked:
    """A storage that waits; `host` None: its content does not matter."""

    storage: Any
    size_bytes: int
    device: torch.device
    host: Tensor | None

    def view(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)


class Offload:
    """Moves tensors between the device and the host.

    Args:
        kept: the tensors whose content matters; asked anew each time, since an optimizer makes its own late.
        scratch: those whose content does not.
    """

    def __init__(
        self, kept: Callable[[], Iterable[Tensor]], scratch: Callable[[], Iterable[Tensor]], memory: Memory
    ) -> None:
        self._kept, self._scratch, self._memory = kept, scratch, memory
        self._hosts: dict[int, Tensor] = {}
        self._away: list[_Parked] = []
        self._users = 0

    @contextmanager
    def here(self) -> Iterator[None]:
        """They are on the device meanwhile; may be nested."""
        self._users += 1
        try:
            if self._away:
                self._bring_back()
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._put_away()

    @torch.no_grad()
    def _put_away(self) -> None:
        seen: set[int] = {parked.storage._cdata for parked in self._away}  # left so by a return that failed
        fresh = [*self._parked(self._kept(), seen, keep=True), *self._parked(self._scratch(), seen, keep=False)]
        for parked in fresh:
            if parked.host is not None:
                parked.host.copy_(parked.view(), non_blocking=True)
        self._memory.settle()
        for parked in fresh:
            parked.storage.resize_(0)
        self._away += fresh
        self._memory.give_back()

    @torch.no_grad()
    def _bring_back(self) -> None:
        while self._away:
            parked = self._away[-1]
            parked.storage.resize_(parked.size_bytes)  # out of memory: it still waits, and so do those before it
            self._away.pop()
            if parked.host is None:
                parked.view().zero_()
            else:
                parked.view().copy_(parked.host, non_blocking=True)
        self._memory.settle()

    def _parked(self, tensors: Iterable[Tensor], seen: set[int], *, keep: bool) -> Iterator[_Parked]:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata in seen or not storage.size():
                continue
            seen.add(storage._cdata)
            host = self._host(storage._cdata, storage.size()) if keep else None
            yield _Parked(storage, storage.size(), tensor.device, host)

    def _host(self, key: int, size_bytes: int) -> Tensor:
        held = self._hosts.get(key)
        if held is None or held.numel() != size_bytes:
            held = self._hosts[key] = self._memory.host(size_bytes)
        return held


def device_bytes(device: torch.device) -> dict[str, int]:
    """`peak_device_bytes` since it was last asked, and `waiting_device_bytes`, what is held now; nothing on the CPU."""
    if device.type != "cuda":
        return {}
    found = {
        "peak_device_bytes": torch.cuda.max_memory_allocated(device),
        "waiting_device_bytes": torch.cuda.memory_reserved(device),
    }
    torch.cuda.reset_peak_memory_stats(device)
    return found
