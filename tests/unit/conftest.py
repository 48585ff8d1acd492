"""What the ledger's tests run on: SQLite and a real PostgreSQL, the same tests on both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import postgres


@pytest.fixture
def postgres_url(postgres_server: postgres.Server) -> Iterator[str]:
    """An empty ledger in PostgreSQL."""
    with postgres.emptied(postgres_server, "ledger") as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty ledger of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    return str(request.getfixturevalue("postgres_url"))
