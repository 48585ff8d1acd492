"""Schema 2: runs that are paused or deleted, snapshots claimed for deletion, a priority that is the run's."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Boolean, Column, Float, false

from eval_service.ledger.migrations.columns import whole

revision = "0002"
down_revision = "0001"
_CONVENTION = {"fk": "%(table_name)s_%(column_0_name)s_fkey"}  # as PostgreSQL names them; SQLite names none


def upgrade() -> None:
    """Change the tables."""
    op.add_column("runs", Column("paused", Boolean, nullable=False, server_default=false()))
    op.add_column("runs", Column("resumed_at", Float))
    op.add_column("runs", Column("deleted_at", Float))
    op.add_column("snapshots", Column("deleting_at", Float))
    with op.batch_alter_table("points") as points:
        points.alter_column("priority", existing_type=whole, nullable=True)
    with op.batch_alter_table("drains", naming_convention=_CONVENTION) as drains:  # a receipt outlasts its run
        drains.drop_constraint("drains_run_fkey", type_="foreignkey")
