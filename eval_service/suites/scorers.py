"""The scorers, as small registered functions of (output, answer) -> score in [0, 1]. One that has to find an answer in
the output first, and can't, raises `Unparsed`.

They run in processes of ScorerPool's, never in the controller's, so this module imports next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class Unparsed(Exception):
    """No extractor finds an answer in the output: it scores 0, and is told apart from a wrong answer."""


ScorerFunction = Callable[[str, str], float]


@dataclass(frozen=True, slots=True)
class Scorer:
    """A scorer and the name of the metric that its mean is."""

    name: str
    metric: str
    function: ScorerFunction


SCORERS: dict[str, Scorer] = {}


def scorer(name: str, *, metric: str) -> Callable[[ScorerFunction], ScorerFunction]:
    """Register a scorer under a name that suites use."""

    def register(function: ScorerFunction) -> ScorerFunction:
        if name in SCORERS:
            raise ValueError(f"there is a scorer {name!r} already")
        SCORERS[name] = Scorer(name, metric, function)
        return function

    return register


@scorer("exact", metric="exact_match")
def exact(output: str, answer: str) -> float:
    """1 if the output is the answer, white space around them apart."""
    return float(output.strip() == answer.strip())


@scorer("contains", metric="contains")
def contains(output: str, answer: str) -> float:
    """1 if the answer is somewhere in the output."""
    return float(answer.strip() in output)
