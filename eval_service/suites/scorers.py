"""The scorers, as small registered functions of (output, answer, **options) -> score, sync or async. One that has to
find an answer in the output first, and can't, raises `Unparsed`.

A score is a number, or several by name, of which the first is the one that counts. They run in processes of
ScorerPool's, never in the controller's, so this module imports next to nothing; what needs a library imports it when
it is first called.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any


class Unparsed(Exception):
    """No extractor finds an answer in the output: it scores 0, and is told apart from a wrong answer."""


Scored = float | Mapping[str, float]
ScorerFunction = Callable[..., Scored | Awaitable[Scored]]


@dataclass(frozen=True, slots=True)
class Scorer:
    """A scorer and the name of the metric that its mean is."""

    name: str
    metric: str
    function: Callable[..., Any]


SCORERS: dict[str, Scorer] = {}
# Scorers that need more than the standard library; only the processes that score load them.
_FURTHER = ("eval_service.suites.code_scorer", "eval_service.suites.packaged_scorers")


def load_all() -> None:
    """Have every scorer of ours in `SCORERS`."""
    for module in _FURTHER:
        importlib.import_module(module)


_F = Callable[[Callable[..., Any]], Callable[..., Any]]


def scorer(name: str, *, metric: str) -> _F:
    """Register a scorer under a name that suites use."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if name in SCORERS:
            raise ValueError(f"there is a scorer {name!r} already")
        SCORERS[name] = Scorer(name, metric, function)
        return function

    return register


@scorer("exact", metric="exact_match")
def exact(output: str, answer: str, *, ignore_case: bool = False) -> float:
    """1 if the output is the answer, white space around them apart."""
    return float(_plain(output, ignore_case) == _plain(answer, ignore_case))


@scorer("contains", metric="contains")
def contains(output: str, answer: str, *, ignore_case: bool = False) -> float:
    """1 if the answer is somewhere in the output."""
    return float(_plain(answer, ignore_case) in (output.casefold() if ignore_case else output))


@scorer("regex", metric="regex_match")
def regex(output: str, answer: str, *, pattern: str, take: str = "last", ignore_case: bool = False) -> float:
    """1 if what the pattern finds in the output is the answer."""
    found = extract(output, pattern, take=take, ignore_case=ignore_case)
    return float(_plain(found, ignore_case) == _plain(answer, ignore_case))


@scorer("numeric", metric="numeric_match")
def numeric(output: str, answer: str, *, tolerance: float = 1e-6) -> float:
    """1 if the output's number is the answer's; in either, what follows `####` is taken, else the last number."""
    expected = number_in(answer)
    if expected is None:
        raise ValueError(f"the answer holds no number: {answer[:80]!r}")
    found = number_in(output)
    if found is None:
        raise Unparsed
    return float(abs(found - expected) <= Decimal(repr(tolerance)) * abs(expected))


@scorer("judge", metric="judged")
def judged(output: str, answer: str, *, verdict: str, scores: Mapping[str, float], scale: float) -> float:
    """The score that a judge's text says; one that can't be read is an error, and no opinion of the answer."""
    try:
        told = extract(output, verdict, take="last", ignore_case=True).strip()
    except Unparsed:
        raise ValueError(f"the judge gave no verdict: {output[-200:]!r}") from None
    by_name = {name.casefold(): score for name, score in scores.items()}
    if told.casefold() in by_name:
        return by_name[told.casefold()]
    try:
        value = float(told)
    except ValueError:
        raise ValueError(f"the judge's verdict is none of {', '.join(scores) or 'a number'}: {told[:80]!r}") from None
    if not 0 <= value <= scale:
        raise ValueError(f"the judge's verdict is outside 0 to {scale:g}: {told[:80]!r}")
    return value / scale


def called(name: str, options: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function of a scorer, and what it is given by name.

    Raises:
        KeyError: there is none of that name; whatever importing the user's module raises.
    """
    if name != "function":
        return SCORERS[name].function, options
    return user_function(options["function"], options.get("directory")), options["arguments"]


@lru_cache(maxsize=64)
def user_function(path: str, directory: str | None) -> Callable[..., Any]:
    """`module:function`, looked for beside the suites file first.

    Raises:
        TypeError: it is nothing that can be called; whatever importing its module raises.
    """
    if directory is not None and directory not in sys.path:
        sys.path.insert(0, directory)
    module, _, name = path.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{path} is {type(function).__name__}, which can't be called")
    return function  # type: ignore[no-any-return]


# --- extractors


def extract(output: str, pattern: str, *, take: str = "last", ignore_case: bool = False) -> str:
    """The first group of a pattern's first or last find, or all of the find where it has no group.

    Raises:
        Unparsed: it finds nothing.
    """
    finds = list(re.finditer(pattern, output, re.MULTILINE | (re.IGNORECASE if ignore_case else 0)))
    if not finds:
        raise Unparsed
    found = finds[0] if take == "first" else finds[-1]
    group = found[1] if found.re.groups else found[0]
    if group is None:
        raise Unparsed
    return group


# Digits that stand alone: `1,234.5`, `.5`, `-3`, `2e3`; a minus behind a digit or letter is no sign.
_NUMBER = re.compile(
    r"(?<![\w.])(?:(?<![\w)])[-+−])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))(?:[eE][-+]?\d+)?"
)
_MARK = "####"


def number_in(text: str) -> Decimal | None:
    """The number that a text ends in: the first after its last `####`, else its last; None if there is none."""
    if _MARK in text:
        found = _NUMBER.search(text, text.rindex(_MARK) + len(_MARK))
        return _decimal(found[0]) if found else None
    finds = _NUMBER.findall(text)
    return _decimal(finds[-1]) if finds else None


def _decimal(text: str) -> Decimal | None:
    try:
        value = Decimal(text.replace(",", "").replace("−", "-"))
    except InvalidOperation:
        return None
    return value if value.is_finite() and abs(value.adjusted()) < 400 else None


def _plain(text: str, ignore_case: bool) -> str:
    text = text.strip()
    return text.casefold() if ignore_case else text
