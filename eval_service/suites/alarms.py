"""Alarms: what at a point is worth a look before more of a run is wasted. Pure functions of a point's numbers and of
those of the point before it; nothing here ends or changes anything.

Invariant: every alarm carries the numbers that raised it. What rests on chance is raised only where two 95% intervals
do not meet.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from eval_service.contract.metric_keys import ERROR_RATE, TRUNCATED
from eval_service.contract.results import Alarm, AlarmKind, Direction, Metric, SampleView
from eval_service.suites.sources import Source

EOS_SAMPLES = 8  # fewer answers that were all cut say little
EOS_TOKENS = 4  # a suite that asks for no more (a letter, a number) cuts them by design
TRUNCATION_RISE = 0.05  # a smaller jump is nobody's emergency, however sure it is


@dataclass(frozen=True, slots=True)
class Told:
    """What a recorded point tells of itself."""

    point: str
    step: int
    headline: str
    direction: Direction
    suite_digest: str
    metrics: Mapping[str, Metric]


def alarms_of(samples: Sequence[SampleView], headline: Metric | None, *, max_error_rate: float) -> tuple[Alarm, ...]:
    """What a point's own samples say."""
    found = (
        _none_scored(samples, headline),
        _eos_never(samples),
        _not_finite(samples),
        _error_rate(samples, max_error_rate),
    )
    return tuple(alarm for alarm in found if alarm is not None)


def suite_stale(found: Sequence[tuple[Source, str | None]]) -> tuple[Alarm, ...]:
    """What a suite's files tell that hold something else than was read of them: each with that digest, if any."""
    if not found:
        return ()
    source, now = found[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    what = "is gone" if now is None else "has changed"
    then = "this point was asked what was read then" if source.path.suffix != ".py" else "it may score as it is now"
    return (
        Alarm(
            kind=AlarmKind.SUITE_STALE,
            message=f"{source.path}{more} {what} since the service read it; {then}: restart it to read it again",
            evidence={"file": str(source.path), "files": len(found), "was": source.digest, "is": now},
        ),
    )


def prompt_cut(cut: int, prompts: int, most: int, context: int) -> tuple[Alarm, ...]:
    """What lm-eval's tasks tell of prompts that the engine's context did not hold; `most` is of tokens."""
    if not cut:
        return ()
    tokens = "1 token" if most == 1 else f"up to {most} tokens"
    return (
        Alarm(
            kind=AlarmKind.PROMPT_CUT,
            message=f"{cut} of {prompts} prompts lost {tokens} at their beginning: the engine's context is {context}, "
            "for prompt and answer",
            evidence={"cut": cut, "prompts": prompts, "most_tokens": most, "context": context},
        ),
    )


def alarms_against(before: Told | None, now: Told) -> tuple[Alarm, ...]:
    """What a point says beside the one before it, by step, of the same run and suite."""
    if before is None:
        return ()
    if before.suite_digest != now.suite_digest:
        return (_suite_changed(before, now),)
    found = (_truncation_jump(before, now), _score_collapse(before, now))
    return tuple(alarm for alarm in found if alarm is not None)


COMPARING = frozenset({AlarmKind.TRUNCATION_JUMP, AlarmKind.SCORE_COLLAPSE, AlarmKind.SUITE_CHANGED})


def _none_scored(samples: Sequence[SampleView], headline: Metric | None) -> Alarm | None:
    if headline is not None and math.isfinite(headline.value):
        return None
    errored = sum(sample.error is not None for sample in samples)
    message = f"not one sample of the headline has a score: {errored} of {len(samples)} samples errored"
    return Alarm(
        kind=AlarmKind.NONE_SCORED,
        message=message,
        evidence={"samples": len(samples), "errored": errored, "error": _usual_error(samples)},
    )


def _eos_never(samples: Sequence[SampleView]) -> Alarm | None:
    answered = [sample for sample in samples if sample.finish_reason is not None]
    if len(answered) < EOS_SAMPLES or any(sample.finish_reason != "length" for sample in answered):
        return None
    longest = max(sample.output_tokens for sample in answered)
    if longest <= EOS_TOKENS:
        return None
    return Alarm(
        kind=AlarmKind.EOS_NEVER,
        message=f"none of {len(answered)} answers ended by itself: all were cut at max_new_tokens",
        evidence={"answered": len(answered), "output_tokens": longest},
    )


def _not_finite(samples: Sequence[SampleView]) -> Alarm | None:
    scores = sum(bool(sample.error and sample.error.startswith("the scorer returned")) for sample in samples)
    logprobs = sum(sample.logprob is not None and not math.isfinite(sample.logprob) for sample in samples)
    if not scores and not logprobs:
        return None
    message = f"no finite number: {scores} scores and {logprobs} log-probs of {len(samples)} samples"
    evidence: dict[str, float | int | str | None] = {"scores": scores, "logprobs": logprobs, "samples": len(samples)}
    return Alarm(kind=AlarmKind.NOT_FINITE, message=message, evidence=evidence)


def _error_rate(samples: Sequence[SampleView], most: float) -> Alarm | None:
    errored = sum(sample.error is not None for sample in samples)
    rate = errored / len(samples) if samples else 0.0
    if not errored or rate <= most / 2:
        return None
    usual = _usual_error(samples)
    return Alarm(
        kind=AlarmKind.ERROR_RATE,
        message=f"{errored} of {len(samples)} samples errored ({rate:.1%}; {most:.1%} would fail the point): {usual}",
        evidence={ERROR_RATE: rate, "max_error_rate": most, "errored": errored, "error": usual},
    )


def _truncation_jump(before: Told, now: Told) -> Alarm | None:
    was, there = before.metrics.get(TRUNCATED), now.metrics.get(TRUNCATED)
    if was is None or there is None or there.value - was.value < TRUNCATION_RISE or not _above(there, was):
        return None
    return Alarm(
        kind=AlarmKind.TRUNCATION_JUMP,
        message=f"{there.value:.1%} of the answers were cut, {was.value:.1%} at step {before.step}",
        evidence=_both(before, was, there),
    )


def _score_collapse(before: Told, now: Told) -> Alarm | None:
    if before.headline != now.headline:
        return None
    was, there = before.metrics.get(before.headline), now.metrics.get(now.headline)
    if was is None or there is None:
        return None
    worse = _above(was, there) if now.direction is Direction.MAX else _above(there, was)
    if not worse:
        return None
    return Alarm(
        kind=AlarmKind.SCORE_COLLAPSE,
        message=f"{now.headline} went from {was.value:.3f} at step {before.step} to {there.value:.3f}, "
        "beyond both 95% intervals",
        evidence=_both(before, was, there),
    )


def _suite_changed(before: Told, now: Told) -> Alarm:
    return Alarm(
        kind=AlarmKind.SUITE_CHANGED,
        message=f"the suite or its data is not what step {before.step} was asked; the two can't be compared",
        evidence={"step": before.step, "point": before.point, "was": before.suite_digest, "is": now.suite_digest},
    )


def _above(upper: Metric, lower: Metric) -> bool:
    """Whether one interval lies wholly above the other; one that is not known lies nowhere."""
    return upper.low is not None and lower.high is not None and upper.low > lower.high


def _both(before: Told, was: Metric, there: Metric) -> dict[str, float | int | str | None]:
    return {
        "point": before.point,
        "step": before.step,
        "was": was.value,
        "was_low": was.low,
        "was_high": was.high,
        "is": there.value,
        "is_low": there.low,
        "is_high": there.high,
    }


def _usual_error(samples: Iterable[SampleView]) -> str | None:
    counted = Counter(sample.error for sample in samples if sample.error is not None)
    return counted.most_common(1)[0][0][:500] if counted else None
