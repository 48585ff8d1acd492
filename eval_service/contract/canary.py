"""The canary: fixed token sequences, the same for trainer and engines, and whether their log-probs agree.

Both round, so log-probs of the same weights differ. By how much is measured: a model that has learned loses more than
an untrained one, and about half of it at a tenth of the tokens, at which it is undecided. So two figures are held
against bounds of their own: the mean over all tokens, and over all but those that differ most.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

ROWS = 4
LENGTH = 32
TYPICAL = 0.75  # the part of the tokens, those that differ least, over which the second mean is

Rows = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Rounding:
    """What a forward pass in a dtype may lose, in nats: the largest of three.

    Attributes:
        floor: whatever the model.
        of_spread: of how far log-probs are apart: an error of a hidden state moves logits in proportion to that.
        of_size: of how large log-probs are: logits that large are rounded by as much (the dtype's unit roundoff).
    """

    floor: float
    of_spread: float
    of_size: float

    def bound(self, spread: float, size: float) -> float:
        """Of a mean absolute difference, for log-probs of that spread and size."""
        return max(self.floor, self.of_spread * spread, self.of_size * size)


# Seen in tiny models in float32: the same weights differ by 5e-7 where the spread is small and 1.3e-5 where it is 19,
# and weights moved by 1e-5 by 1.2e-4 and more. In bfloat16 the same weights differ by 0.5% to 1.6% of the spread, and
# typically by up to 0.0115 nats; two tensors swapped by 0.5 and more (docs/measurements).
ROUNDING = {"float32": Rounding(2e-5, 5e-6, 2**-24), "bfloat16": Rounding(0.03, 0.06, 2**-8)}
_LOOSEST = "bfloat16"


@dataclass(frozen=True, slots=True)
class Agreement:
    """An engine's log-probs against a canary's, in nats.

    Attributes:
        mean: absolute difference over all tokens; infinite where shapes differ, there is none, or one is not finite.
        typical: the same without the quarter of the tokens that differ most.
    """

    mean: float
    mean_bound: float
    typical: float
    typical_bound: float

    @property
    def ok(self) -> bool:
        """Whether the engine computes what the exporter did, but for rounding."""
        return self.mean <= self.mean_bound and self.typical <= self.typical_bound

    def __str__(self) -> str:
        of_all = f"log-probs differ by {self.mean:.3g} nats on average (at most {self.mean_bound:.3g} is right)"
        return f"{of_all}, typically by {self.typical:.3g} (at most {self.typical_bound:.3g})"


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


def compare_canary(wanted: Rows, seen: Rows, dtype: str, *dtypes: str) -> Agreement:
    """Hold an engine's log-probs of a canary's sequences against the canary's own.

    The bounds are of the canary's log-probs alone, so what an engine answers can't widen them. Its tokens are spread
    over the vocabulary, so their log-probs are apart as logits are.

    Args:
        wanted: the canary's.
        seen: the engine's.
        dtype: of a forward pass, in torch's spelling; of several the loosest counts, as one that is not known does.
    """
    differences = _differences(wanted, seen)
    known = [ROUNDING.get(one.removeprefix("torch."), ROUNDING[_LOOSEST]) for one in (dtype, *dtypes)]
    values = [value for row in wanted for value in row] or [0.0]
    middle, mean = statistics.median(values), _mean(values)
    apart = [abs(value - middle) for value in values]
    sizes = [abs(value) for value in values]
    spread = _mean([abs(value - mean) for value in values])
    return Agreement(
        mean=_mean(differences),
        mean_bound=max(one.bound(spread, _mean(sizes)) for one in known),
        typical=_mean(sorted(differences)[: max(1, math.ceil(TYPICAL * len(differences)))]),
        typical_bound=max(one.bound(statistics.median(apart), statistics.median(sizes)) for one in known),
    )


def _differences(wanted: Rows, seen: Rows) -> list[float]:
    if [len(row) for row in wanted] != [len(row) for row in seen]:
        return [math.inf]
    apart = [abs(a - b) for left, right in zip(wanted, seen, strict=True) for a, b in zip(left, right, strict=True)]
    return apart if apart and all(map(math.isfinite, apart)) else [math.inf]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
