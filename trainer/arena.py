"""Host memory in blocks that many tensors share, pinned where a GPU copies to it: pinning each by itself takes long.

What is left of a block goes to the next tensor that it holds.
"""

from __future__ import annotations

from torch import Tensor

from trainer.host_memory import host_memory

_BLOCK_BYTES, _ALIGNED_BYTES = 64 << 20, 64


class HostArena:
    """Grows with what is asked of it, and gives nothing back while it lives."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[Tensor] = []
        self._used: list[int] = []

    @property
    def size_bytes(self) -> int:
        """What it has allocated."""
        return sum(block.numel() for block in self._blocks)

    def clear(self) -> None:
        """Nothing that `room` returned is needed any more."""
        self._used = [0] * len(self._blocks)

    def room(self, size_bytes: int) -> Tensor:
        """Memory that nobody else has: uint8, [size_bytes], aligned for any dtype."""
        number = next((n for n, block in enumerate(self._blocks) if block.numel() - self._used[n] >= size_bytes), None)
        if number is None:
            number = len(self._blocks)
            self._blocks.append(host_memory(max(_BLOCK_BYTES, size_bytes), pinned=self._pinned))
            self._used.append(0)
        at = self._used[number]
        self._used[number] = at + -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return self._blocks[number][at : at + size_bytes]
