"""The names of metrics, and their keys in trackers: the one place that knows them.

A point's metrics are named `<metric>` over all datasets and `<dataset>/<metric>` by dataset; a tracker has them as
`eval/<suite>/<metric>` and `eval/<suite>/<dataset>/<metric>`. What a point cost is `eval/<cost>`.
"""

from __future__ import annotations

ERROR_RATE = "error_rate"
TRUNCATED = "truncated"
EMPTY = "empty"
UNPARSED = "unparsed"
RATIOS = (ERROR_RATE, TRUNCATED, EMPTY, UNPARSED)


def pass_at(k: int) -> str:
    """At least one of k samples is right."""
    return f"pass@{k}"


def pass_all(k: int) -> str:
    """All of k samples are right."""
    return f"pass^{k}"


def avg_at(k: int) -> str:
    """The mean of k samples a prompt, every prompt counting the same."""
    return f"avg@{k}"


def metric_key(suite: str, metric: str) -> str:
    """A tracker's key for a point's metric, which may be `<dataset>/<metric>`."""
    return f"eval/{suite}/{metric}"


def cost_key(cost: str) -> str:
    """A tracker's key for `lag_steps`, `stall_s` and their like."""
    return f"eval/{cost}"


def end_key(state: str, reason: str) -> str:
    """A tracker's key for points without a result: `eval/skipped_busy`, `eval/failed_deadline`."""
    return f"eval/{state}_{reason}"


def dataset_of(metric: str) -> tuple[str | None, str]:
    """A point's metric taken apart: the dataset (None: over all), and the bare name."""
    dataset, slash, name = metric.rpartition("/")
    return (dataset if slash else None), name
