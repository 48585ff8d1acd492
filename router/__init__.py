"""The data plane: a sized pool, choice, health and admission. It knows nothing of evals."""

from router.errors import (
    CutShort,
    DeadlinePassed,
    NoTarget,
    NoUpstream,
    QueueFull,
    RouterError,
    UpstreamFailed,
    WaitTimeout,
)
from router.exchange import Reply, Request
from router.faults import Broken, Fault, FaultKind
from router.health import Health, Prober
from router.limits import Limits
from router.router import Answer, Router
from router.stats import Stats, TargetStats, Totals, UpstreamStats
from router.upstream import Upstream

__all__ = [
    "Answer",
    "Broken",
    "CutShort",
    "DeadlinePassed",
    "Fault",
    "FaultKind",
    "Health",
    "Limits",
    "NoTarget",
    "NoUpstream",
    "Prober",
    "QueueFull",
    "Reply",
    "Request",
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
