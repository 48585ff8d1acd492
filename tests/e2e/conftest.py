"""One Ray, one Serve, two real engines for the whole session; what kills any of them is marked and runs last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eval_service.demo.processes import Family
from tests.support.live import Live


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The running service."""
    family = Family()
    service = Live(Path(tmp_path_factory.mktemp("live")), family)
    service.build()
    try:
        service.start()
        yield service
    finally:
        service.close()
        left = family.end()
    assert left == [], f"these had to be killed: {left}"
