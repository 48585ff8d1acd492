"""The fixed token sequences of the canary: trainer and engines compute them alike from the size of the vocabulary."""

from __future__ import annotations

ROWS = 4
LENGTH = 32


def canary_token_ids(vocab_size: int, *, rows: int = ROWS, length: int = LENGTH) -> tuple[tuple[int, ...], ...]:
    """`rows` sequences of `length` ids in [0, vocab_size), spread over the vocabulary, the same on every machine.

    Args:
        vocab_size: of the snapshot's config, without padding.
    """
    state = 0x9E3779B97F4A7C15
    result = []
    for _ in range(rows):
        row = []
        for _ in range(length):
            # Knuth's 64-bit linear congruential generator; its high bits are the good ones.
            state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
            row.append((state >> 33) % vocab_size)
        result.append(tuple(row))
    return tuple(result)
