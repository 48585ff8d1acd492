"""From samples to metrics: means that say how sure they are, and errored samples kept apart from wrong ones.

A sample with an error has no score and is in no mean; it counts in `error_rate` alone. `truncated`, `empty` and
`unparsed` are shares of the samples that were answered, told beside the score. docs/statistics.md has every formula.

Invariant: the samples of one prompt are not independent, so whatever has several a prompt takes its error from the
spread between prompts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from eval_service.contract.metric_keys import EMPTY, ERROR_RATE, TRUNCATED, UNPARSED, avg_at, pass_all, pass_at
from eval_service.contract.results import Metric, SampleView
from eval_service.suites.config import attempts_told
from eval_service.suites.distributions import t_quantile, wilson
from eval_service.suites.suite import Suite

RIGHT = 1.0  # a score from here on is a success


@dataclass(frozen=True, slots=True)
class Aggregated:
    """What a point's samples amount to. `score` is None where not one sample of the headline could be scored."""

    metrics: dict[str, Metric]
    headline: str
    score: float | None
    stderr: float | None
    error_rate: float


def mean_of(values: Sequence[float], prompts: Sequence[int] | None = None) -> Metric | None:
    """The mean with its standard error and 95% interval; None of no values.

    Args:
        prompts: the prompt of each value. Where one has several, the error is clustered by prompt.
    """
    if not values:
        return None
    clusters = len(set(prompts)) if prompts is not None else len(values)
    mean = _mean(values)
    if prompts is None or clusters == len(values):
        stderr = _stderr([value - mean for value in values], len(values))
        low, high = _interval(values, mean, stderr, clusters)
        return Metric(value=mean, stderr=stderr, n=len(values), low=low, high=high)
    residuals: dict[int, list[float]] = defaultdict(list)
    for value, prompt in zip(values, prompts, strict=True):
        residuals[prompt].append(value - mean)
    stderr = _stderr([math.fsum(own) for own in residuals.values()], len(values))
    low, high = _interval(values, mean, stderr, clusters, clustered=True)
    return Metric(value=mean, stderr=stderr, n=len(values), low=low, high=high, prompts=clusters)


def weighted_mean(metrics: Mapping[str, Metric | None], weights: Mapping[str, float]) -> Metric | None:
    """Of datasets' own metrics, which are independent of each other; None where one of them is not known.

    The interval reaches as far as those of the datasets do together, squared and added to either side (Newcombe's way
    from two proportions to their difference): it is not empty where each dataset is all right or all wrong.
    """
    told = {name: metric for name, metric in metrics.items() if metric is not None}
    if len(told) < len(metrics) or not told:
        return None
    total = math.fsum(weights[name] for name in told)
    value = math.fsum(weights[name] * metric.value for name, metric in told.items()) / total
    n = sum(metric.n for metric in told.values())

    def together(parts: Mapping[str, float | None]) -> float | None:
        known = [weights[name] / total * part for name, part in parts.items() if part is not None]
        return math.sqrt(math.fsum(part**2 for part in known)) if len(known) == len(parts) else None

    below = together({name: None if m.low is None else m.value - m.low for name, m in told.items()})
    above = together({name: None if m.high is None else m.high - m.value for name, m in told.items()})
    return Metric(
        value=value,
        stderr=together({name: metric.stderr for name, metric in told.items()}),
        n=n,
        low=None if below is None else value - below,
        high=None if above is None else value + above,
    )


def chance_of_any(n: int, right: int, k: int) -> float:
    """pass@k of one prompt without bias: the chance that k of its n samples, drawn at random, have a right one."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def chance_of_all(n: int, right: int, k: int) -> float:
    """pass^k of one prompt without bias: the chance that k of its n samples, drawn at random, are all right."""
    return math.comb(right, k) / math.comb(n, k)


def aggregate(suite: Suite, samples: Sequence[SampleView]) -> Aggregated:
    """All metrics of a suite: the scorer's mean, pass@k, ..., over all and by dataset; the ratios over all."""
    answered = [sample for sample in samples if sample.finish_reason is not None]
    found = _scored(suite, samples)
    own: dict[str, dict[str, Metric | None]] = {}
    for dataset in suite.config.datasets:
        own[dataset.name] = _scored(suite, [s for s in samples if s.dataset == dataset.name])
        found |= {f"{dataset.name}/{name}": metric for name, metric in own[dataset.name].items()}
    if suite.config.weighted:
        weights = {dataset.name: dataset.weight for dataset in suite.config.datasets}
        names = list(next(iter(own.values())))
        found |= {name: weighted_mean({key: told[name] for key, told in own.items()}, weights) for name in names}
    found |= {
        ERROR_RATE: _share(samples, lambda sample: sample.error is not None),
        TRUNCATED: _share(answered, lambda sample: sample.finish_reason == "length"),
        EMPTY: _share(answered, lambda sample: not sample.output.strip()),
        UNPARSED: _share(answered, lambda sample: sample.unparsed),
    }
    metrics = {name: metric for name, metric in found.items() if metric is not None}
    headline, errors = metrics.get(suite.headline), metrics.get(ERROR_RATE)
    return Aggregated(
        metrics=metrics,
        headline=suite.headline,
        score=headline.value if headline else None,
        stderr=headline.stderr if headline else None,
        error_rate=errors.value if errors else 0.0,
    )


def _scored(suite: Suite, samples: Sequence[SampleView]) -> dict[str, Metric | None]:
    """The metrics that are made of scores; `n` samples a prompt have some more."""
    by_prompt: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.score is not None and sample.error is None:
            by_prompt[sample.prompt_index].append(sample.score)
    scores = [score for own in by_prompt.values() for score in own]
    prompts = [prompt for prompt, own in by_prompt.items() for _ in own]
    n = suite.sampling.n
    found = {suite.metric: mean_of(scores, prompts)}
    for name in suite.config.scorer.more_metrics:
        beside = [(s.more[name], s.prompt_index) for s in samples if s.error is None and name in s.more]
        found[name] = mean_of([value for value, _ in beside], [prompt for _, prompt in beside])
    if n == 1:
        return found
    passed = [(len(own), sum(score >= RIGHT for score in own)) for own in by_prompt.values()]
    for k in attempts_told(n):
        counted = [own for own in passed if own[0] >= k]
        found[pass_at(k)] = mean_of([chance_of_any(*own, k) for own in counted])
        if k > 1:
            found[pass_all(k)] = mean_of([chance_of_all(*own, k) for own in counted])
    found[avg_at(n)] = mean_of([_mean(own) for own in by_prompt.values()])
    return found


def _share(samples: Iterable[SampleView], has: Callable[[SampleView], bool]) -> Metric | None:
    samples = list(samples)
    return mean_of([float(has(sample)) for sample in samples], [sample.prompt_index for sample in samples])


def _mean(values: Sequence[float]) -> float:
    """Of equal values it is exactly that value."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def _stderr(residuals: Sequence[float], n: int) -> float | None:
    """Of a mean of n values, from the sums of each cluster's residuals; None below two clusters."""
    clusters = len(residuals)
    if clusters < 2:
        return None
    return math.sqrt(clusters / (clusters - 1) * math.fsum(value * value for value in residuals)) / n


def _interval(
    values: Sequence[float], mean: float, stderr: float | None, clusters: int, *, clustered: bool = False
) -> tuple[float | None, float | None]:
    """Wilson's for shares of independent values, else Student's t between the clusters, cut to where scores lie.

    Where every value of a share is the same there is no spread to go by, clustered or not: Wilson's over the clusters.
    """
    is_share = all(value in (0.0, 1.0) for value in values)
    if is_share and (not clustered or (mean in (0.0, 1.0) and clusters > 1)):
        return wilson(mean, clusters)
    if stderr is None:
        return None, None
    reach = t_quantile(clusters - 1) * stderr
    low, high = mean - reach, mean + reach
    if all(0.0 <= value <= 1.0 for value in values):
        return max(0.0, low), min(1.0, high)
    return low, high
