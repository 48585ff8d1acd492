"""Schema 3: which metric a point's score is, what it was measured with, and the alarms."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, inspect

from eval_service.ledger.migrations.columns import name, text

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add what is not there: this step was once taken without being written down."""
    there = {column["name"] for column in inspect(op.get_bind()).get_columns("points")}
    added = {"headline": name(256), "direction": name(8), "suite_digest": name(32), "alarms": text}
    for column, kind in added.items():
        if column not in there:
            op.add_column("points", Column(column, kind))
