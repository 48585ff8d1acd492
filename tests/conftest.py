"""The tiers in their order, each with a time budget that is printed beside what it took."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support import postgres
from tests.support.lanes import Lanes
from tests.support.zygote import Zygote, zygote

# Seconds on two cores, integration and e2e beside each other; what goes over is told, before CI feels it.
BUDGETS_S = {"unit": 140, "integration": 900, "e2e": 960}
ROOT = Path(__file__).parent

# Nothing in the tests may reach for a model hub or phone home.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# The same examples in every run: a test that fails does so again. HYPOTHESIS_PROFILE=explore looks for others.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(scope="session")
def trainer_zygote() -> Iterator[Zygote]:
    """Forks trainer processes, for all tiers: what a trainer imports takes 8 s of a core."""
    with zygote(ROOT.parent) as held:
        yield held


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.Server]:
    """A PostgreSQL of the session's own."""
    if postgres.programs() is None:
        pytest.skip(postgres.MISSING)
    with postgres.server() as running:
        yield running


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tier by tier, what is destructive last; of several workers one begins with the longest, which is not split."""
    order = list(reversed(BUDGETS_S) if hasattr(config, "workerinput") else BUDGETS_S)
    items.sort(key=lambda item: (item.get_closest_marker("destructive") is not None, order.index(_tier(item.path))))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes:
    """See tests.support.lanes."""
    return Lanes(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What each tier took: of several workers the one that had most of it to do."""
    took: dict[str, dict[str, float]] = {tier: defaultdict(float) for tier in BUDGETS_S}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                tier = _tier(ROOT.parent / report.nodeid.split("::")[0])
                took[tier][getattr(report, "worker_id", "")] += report.duration
    terminalreporter.section("tiers")
    for tier, workers in took.items():
        if workers:
            longest_s, budget_s = max(workers.values()), BUDGETS_S[tier]
            over = "  OVER ITS BUDGET" if longest_s > budget_s else ""
            terminalreporter.write_line(f"{tier:12} {longest_s:6.0f} s of {budget_s} s{over}")


def _tier(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]
