"""The one copy that a step waits for: every byte of every tensor, whoever of several threads takes it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.buffer import HostBuffer, Move, shared_out


@given(sizes=st.lists(st.integers(0, 50)), shares=st.integers(1, 5))
def test_each_byte_is_in_one_share_and_no_share_has_more_than_its_part(sizes: list[int], shares: int) -> None:
    moves, at = [], 0
    for size in sizes:
        moves.append(Move(at, 1000 + at, size))
        at += size
    found = shared_out(moves, shares)
    assert [to for share in found for move in share for to in range(move.to, move.to + move.size)] == list(range(at))
    assert all(move.source - move.to == 1000 for share in found for move in share)
    assert max(sum(move.size for move in share) for share in found) == -(-at // shares)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_what_is_copied_is_the_tensors_also_those_of_another_dtype_or_order(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.buffer._WORTH_THREADS_BYTES", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "plain": torch.randn(7, 5, generator=generator).bfloat16(),
        "wide": torch.randn(3, generator=generator),
        "turned": torch.randn(4, 6, generator=generator).bfloat16().T,
        "empty": torch.empty(0, dtype=torch.bfloat16),
        "last": torch.randn(11, generator=generator).bfloat16(),
    }
    buffer = HostBuffer(tensors, torch.bfloat16)
    buffer.copy(tensors)
    for name, tensor in tensors.items():
        torch.testing.assert_close(buffer.views[name], tensor.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("piece_bytes", [1, 2, 14, 1000])
def test_what_lies_on_the_device_comes_to_the_host_whole_in_pieces_of_any_size(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.buffer.PIECE_BYTES", piece_bytes)
    tensors = {
        "one": torch.randn(7, 5).bfloat16(),
        "empty": torch.empty(0).bfloat16(),
        "other": torch.randn(3).bfloat16(),
    }
    buffer = HostBuffer(tensors, torch.bfloat16, near=True)
    buffer.copy(tensors)
    assert not any(buffer.views["one"].flatten()), "the step's copy is on the device alone"
    buffer.settle()
    for name, tensor in tensors.items():
        torch.testing.assert_close(buffer.views[name], tensor, rtol=0, atol=0)
