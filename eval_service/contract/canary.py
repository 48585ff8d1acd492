"""The canary: fixed token sequences, the same for trainer and engines, and how far their log-probs may be apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

ROWS = 4
LENGTH = 32

# Mean absolute difference of log-probs, in nats, between the trainer's forward pass and the engine's. Measured on an
# untrained model: in float32 the same weights differ by at most 5e-7 and weights moved by 1e-5 by 1.2e-4; in bfloat16
# the same weights differ by 0.0064 and weights moved by 1e-3 by 0.124. Each bound lies between, well clear of both.
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.03}
_LOOSEST = "bfloat16"
# What is rounded is hidden states and logits, so log-probs err in proportion to how far logits are apart: of a model
# that has learned much, many times as far as of an untrained one, whose log-probs have this mean absolute deviation.
USUAL_SPREAD = 0.5


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


def canary_tolerance(logprobs: Sequence[Sequence[float]], *dtypes: str) -> float:
    """How far an engine's log-probs may be from a canary's: mean absolute difference, in nats.

    Args:
        logprobs: the canary's. Its tokens are spread over the vocabulary, so their log-probs deviate as logits do.
        dtypes: of the two forward passes, in torch's spelling; the looser one counts, as one that is not known does.
    """
    loosest = max(TOLERANCE.get(dtype.removeprefix("torch."), TOLERANCE[_LOOSEST]) for dtype in dtypes)
    return loosest * max(1.0, spread(logprobs) / USUAL_SPREAD)


def spread(logprobs: Sequence[Sequence[float]]) -> float:
    """Mean absolute deviation from the mean, over all entries; 0 where there are none."""
    values = [value for row in logprobs for value in row]
    if not values:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.fsum(abs(value - mean) for value in values) / len(values)
