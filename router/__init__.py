"""The data plane: a sized pool, choice, health and admission. It knows nothing of evals."""

from router.errors import (
    DeadlinePassed,
    NoTarget,
    NoUpstream,
    QueueFull,
    RouterError,
    UpstreamFailed,
    WaitTimeout,
)
from router.faults import Fault, FaultKind
from router.health import Health, Prober
from router.limits import Limits
from router.router import Answer, Router
from router.stats import Stats, TargetStats, Totals, UpstreamStats
from router.upstream import Upstream

__all__ = [
    "Answer",
    "DeadlinePassed",
    "Fault",
    "FaultKind",
    "Health",
    "Limits",
    "NoTarget",
    "NoUpstream",
    "Prober",
    "QueueFull",
    "Router",
    "RouterError",
    "Stats",
    "TargetStats",
    "Totals",
    "Upstream",
    "UpstreamFailed",
    "UpstreamStats",
    "WaitTimeout",
]
