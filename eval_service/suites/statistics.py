"""From samples to metrics: means with standard errors, and errored samples kept apart from wrong ones.

A sample with an error has no score and is in no mean; it counts in `error_rate` alone. `truncated` and `empty` are
shares of the samples that were answered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eval_service.contract.wire import Metric, SampleView
from eval_service.suites.suite import Suite


@dataclass(frozen=True, slots=True)
class Aggregated:
    """What a point's samples amount to. `score` is None where not one sample of the headline could be scored."""

    metrics: dict[str, Metric]
    headline: str
    score: float | None
    stderr: float | None
    error_rate: float


def mean_of(values: Sequence[float]) -> Metric | None:
    """The mean, its standard error (sample standard deviation / sqrt(n); None below two values), and n."""
    n = len(values)
    if n == 0:
        return None
    mean = math.fsum(values) / n
    if n < 2:
        return Metric(value=mean, stderr=None, n=n)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return Metric(value=mean, stderr=math.sqrt(variance / n), n=n)


def aggregate(suite: Suite, samples: Sequence[SampleView]) -> Aggregated:
    """All metrics of a suite: `exact_match`, `<dataset>/exact_match`, ..., `error_rate`, `truncated`, `empty`."""
    whole, *by_dataset = suite.config.metrics
    answered = [sample for sample in samples if sample.finish_reason is not None]
    found = {
        whole: mean_of(_scores(samples)),
        **{
            name: mean_of(_scores(sample for sample in samples if sample.dataset == dataset.name))
            for name, dataset in zip(by_dataset, suite.config.datasets, strict=True)
        },
        "error_rate": mean_of([float(sample.error is not None) for sample in samples]),
        "truncated": mean_of([float(sample.finish_reason == "length") for sample in answered]),
        "empty": mean_of([float(not sample.output.strip()) for sample in answered]),
    }
    metrics = {name: metric for name, metric in found.items() if metric is not None}
    headline, errors = metrics.get(suite.headline), metrics.get("error_rate")
    return Aggregated(
        metrics=metrics,
        headline=suite.headline,
        score=headline.value if headline else None,
        stderr=headline.stderr if headline else None,
        error_rate=errors.value if errors else 0.0,
    )


def _scores(samples: Iterable[SampleView]) -> list[float]:
    return [sample.score for sample in samples if sample.score is not None and sample.error is None]
