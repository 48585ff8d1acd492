"""One Ray, one Serve, two real engines for the whole session; what kills any of them is marked and runs last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live import Live, serving
from tests.support.zygote import Zygote


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory, trainer_zygote: Zygote) -> Iterator[Live]:
    """The running service."""
    with serving(Path(tmp_path_factory.mktemp("live")), zygote=trainer_zygote) as service:
        yield service
