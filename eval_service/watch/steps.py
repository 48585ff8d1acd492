"""Which step a directory is of, by its name, and which steps are asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from eval_service.contract.errors import InvalidRequest

# checkpoint-100, ckpt_100, step_100, step=100, epoch=1-step=100, global_step100, iter_0000100, step_100-1a2b3c4d, 100
_NAMES = re.compile(
    r"(?:(?:[A-Za-z0-9=.]+[-_])*?(?:checkpoint|ckpt|global[-_]?step|step|iteration|iter)[-_=]?)?(?P<step>[0-9]{1,12})"
    r"(?:-[0-9a-f]{8})?"
)
_UNFINISHED = re.compile(r"(?:\.|tmp|temp|partial)|.*(?:\.tmp|\.partial|-tmp|_tmp)$", re.IGNORECASE)


def compile_pattern(pattern: str | None) -> re.Pattern[str] | None:
    """A pattern of a user's.

    Raises:
        InvalidRequest: it is no regular expression, or has no group for the step.
    """
    if pattern is None:
        return None
    hint = r"such as 'model-(\d+)-final'"
    try:
        compiled = re.compile(pattern)
    except re.error as exc:
        raise InvalidRequest(f"{pattern!r} is no regular expression: {exc}", field="pattern", hint=hint) from exc
    if not compiled.groups:
        raise InvalidRequest(f"{pattern!r} has no group that is the step", field="pattern", hint=hint)
    return compiled


def step_of(name: str, pattern: re.Pattern[str] | None = None) -> int | None:
    """The step that a directory's name tells; None for one that is no checkpoint's, or one still being written.

    Args:
        pattern: matches the whole name; its group `step`, or its first, is the step.
    """
    if pattern is None and _UNFINISHED.match(name):
        return None
    match = (pattern or _NAMES).fullmatch(name)
    if match is None:
        return None
    text = match["step"] if "step" in match.re.groupindex else match[1]
    return int(text) if text is not None and text.isdecimal() else None


@dataclass(frozen=True, slots=True)
class Span:
    """`first` to `last`, both included; `last` None: without end; `every` None: whichever come."""

    first: int
    last: int | None
    every: int | None = None

    def __contains__(self, step: object) -> bool:
        return (
            isinstance(step, int)
            and step >= self.first
            and (self.last is None or step <= self.last)
            and (step - self.first) % (self.every or 1) == 0
        )

    def listed(self) -> list[int]:
        """Its steps, where they can be counted out: neither `100:` nor `100:900` says which there will be."""
        named = self.last is not None and (self.every is not None or self.first == self.last)
        return list(range(self.first, self.last + 1, self.every or 1)) if named and self.last is not None else []


@dataclass(frozen=True, slots=True)
class Steps:
    """What `--steps` says; without spans, every step."""

    spans: tuple[Span, ...] = ()

    def __contains__(self, step: object) -> bool:
        return not self.spans or any(step in span for span in self.spans)

    @property
    def expected(self) -> frozenset[int]:
        """Steps that must come, because they were named."""
        return frozenset(step for span in self.spans for step in span.listed())

    @property
    def closed(self) -> bool:
        """Every step that is asked for is named, so that there is an end."""
        return bool(self.spans) and all(span.listed() for span in self.spans)


def parse_steps(text: str | None) -> Steps:
    """`100,200`, `100:900` (those in between that come), `100:900:100` (each of these must come), `100:`.

    Raises:
        InvalidRequest: anything else.
    """
    if text is None:
        return Steps()
    return Steps(tuple(_span(part.strip()) for part in text.split(",")))


def _span(text: str) -> Span:
    match = re.fullmatch(r"(\d{1,12})(?:(:)(\d{1,12})?(?::(\d{1,12}))?)?", text)
    if match is None:
        raise InvalidRequest(f"{text!r} is not understood", field="steps", hint="write 100,200 or 100:900:100 or 100:")
    first = int(match[1])
    last = first if match[2] is None else int(match[3]) if match[3] else None
    every = int(match[4]) if match[4] else None
    if every == 0 or (last is not None and not 0 <= (last - first) // (every or 10**6) <= 10**6):
        raise InvalidRequest(f"{text!r} names no step, or too many", field="steps", hint="first:last:every")
    return Span(first, last, every)
