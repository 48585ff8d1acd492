"""Schema 4: hard links, servings, events, deliveries, and indexes of what is looked for again and again.

Ledgers of schemas 2 and 3 may have some of these already: they were added where they were missed.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Float, ForeignKey, MetaData, Table, inspect

from eval_service.ledger.migrations.columns import name, text, whole

revision = "0004"
down_revision = "0003"
metadata = MetaData()
_INDEXES = {
    "snapshots_on_storage": ("snapshots", ["deleted_at"]),
    "points_by_run_state": ("points", ["run", "state"]),
    "points_by_state": ("points", ["state", "reason"]),
}

# What they refer to.
Table("snapshots", metadata, Column("id", name(32), primary_key=True))
Table("points", metadata, Column("id", name(32), primary_key=True))
Table(
    "links",
    metadata,
    Column("snapshot", ForeignKey("snapshots.id"), primary_key=True),
    Column("path", text, nullable=False),
    Column("why_not", text),
)
Table(
    "servings",
    metadata,
    Column("point", ForeignKey("points.id"), primary_key=True),
    Column("asked_at", Float, nullable=False),
    Column("until", Float, nullable=False),
    Column("closed_at", Float),
    Column("engines", whole, nullable=False),
    Column("weight_version", name(64)),
    Column("detail", text),
)
Table(
    "events",
    metadata,
    Column("seq", whole, primary_key=True, autoincrement=True),
    Column("kind", name(16), nullable=False),
    Column("run", name(128)),
    Column("data", text, nullable=False),
    Column("at", Float, nullable=False),
    sqlite_autoincrement=True,
)
Table(
    "deliveries",
    metadata,
    Column("name", name(128), primary_key=True),
    Column("seq", whole, nullable=False),
    Column("at", Float, nullable=False),
    Column("delivered", whole, nullable=False),
    Column("refused", whole, nullable=False),
    Column("failures", whole, nullable=False),
    Column("error", text),
)
Table(
    "late_deliveries",
    metadata,
    Column("name", name(128), primary_key=True),
    Column("seq", whole, primary_key=True, autoincrement=False),
    Column("run", name(128), nullable=False),
    Column("kind", name(16), nullable=False),
    Column("data", text, nullable=False),
    Column("at", Float, nullable=False),
    Column("tries", whole, nullable=False),
    Column("next_at", Float, nullable=False),
)


def upgrade() -> None:
    """Add what is not there."""
    metadata.create_all(op.get_bind())
    there = {
        index["name"]: index["column_names"]
        for table in ("snapshots", "points")
        for index in inspect(op.get_bind()).get_indexes(table)
    }
    for index, (table, columns) in _INDEXES.items():
        if index in there and there[index] != columns:
            op.drop_index(index, table)
        if there.get(index) != columns:
            op.create_index(index, table, columns)
