"""The tiers in their order, each with a time budget that is printed beside what it took."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support import postgres
from tests.support.zygote import Zygote, zygote

# Seconds on two cores; what goes over is told, so that a tier is trimmed before CI feels it.
BUDGETS_S = {"unit": 120, "integration": 420, "e2e": 960}
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
        pytest.skip("no PostgreSQL server is installed here (no initdb on PATH or under /usr/lib/postgresql)")
    with postgres.server() as running:
        yield running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tier by tier, what is destructive last."""
    order = list(BUDGETS_S)
    items.sort(key=lambda item: (item.get_closest_marker("destructive") is not None, order.index(_tier(item.path))))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What each tier took: side by side in several processes, or one after another."""
    abreast = terminalreporter.config.getoption("numprocesses", None) or 1
    took: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                took[_tier(ROOT.parent / report.nodeid.split("::")[0])] += report.duration / abreast
    terminalreporter.section("tiers")
    for tier, budget_s in BUDGETS_S.items():
        if tier in took:
            over = "  OVER ITS BUDGET" if took[tier] > budget_s else ""
            terminalreporter.write_line(f"{tier:12} {took[tier]:6.0f} s of {budget_s} s{over}")


def _tier(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]
