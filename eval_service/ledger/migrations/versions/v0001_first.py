"""Schema 1: runs, snapshots, points with their attempts, commands, drains."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Boolean, Column, Float, ForeignKey, Index, MetaData, Table, UniqueConstraint

from eval_service.ledger.migrations.columns import name, text, whole

revision = "0001"
down_revision = None
metadata = MetaData()

Table(
    "meta",
    metadata,
    Column("key", name(64), primary_key=True),
    Column("value", text, nullable=False),
    Column("at", Float, nullable=False),
)

Table(
    "runs",
    metadata,
    Column("run", name(128), primary_key=True),
    Column("spec", text, nullable=False),
    Column("state", name(16), nullable=False),
    Column("step", whole),
    Column("progress_at", Float),
    Column("created_at", Float, nullable=False),
)

Table(
    "snapshots",
    metadata,
    Column("id", name(32), primary_key=True),
    Column("run", ForeignKey("runs.run"), nullable=False),
    Column("step", whole, nullable=False),
    Column("path", text, nullable=False),
    Column("source", name(16), nullable=False),
    Column("claimed_digest", name(32)),
    Column("digest", name(32)),
    Column("tensor_digest", name(32)),
    Column("nonce", name(32)),
    Column("manifest", text),
    Column("vocab_size", whole),
    Column("admitted_at", Float),
    Column("created_at", Float, nullable=False),
    Column("settled_at", Float),
    Column("deleted_at", Float),
    Column("held", Boolean, nullable=False),
    UniqueConstraint("run", "step", "path"),
)

Table(
    "points",
    metadata,
    Column("id", name(32), primary_key=True),
    Column("seq", whole, nullable=False, unique=True),
    Column("run", ForeignKey("runs.run"), nullable=False),
    Column("step", whole, nullable=False),
    Column("suite", name(64), nullable=False),
    Column("reservation", name(36), nullable=False),
    Column("kind", name(16), nullable=False),
    Column("force", Boolean, nullable=False),
    Column("priority", whole, nullable=False),
    Column("source", name(16), nullable=False),
    Column("state", name(16), nullable=False),
    Column("reason", name(32)),
    Column("detail", text),
    Column("superseded", Boolean, nullable=False),
    Column("snapshot_id", ForeignKey("snapshots.id")),
    Column("attempts", whole, nullable=False),
    Column("faults", whole, nullable=False),
    Column("weight_version", name(64)),
    Column("pin_proof", name(16)),
    Column("score", Float),
    Column("stderr", Float),
    Column("metrics", text, nullable=False),
    Column("samples_path", text),
    Column("lag_steps", whole),
    Column("timings", text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("queued_at", Float),
    Column("started_at", Float),
    Column("ended_at", Float),
    UniqueConstraint("reservation", "suite"),
    Index("points_by_run", "run", "step", "suite"),
    Index("points_by_state", "state"),
    Index("points_by_snapshot", "snapshot_id"),
)

Table(
    "attempts",
    metadata,
    Column("point", ForeignKey("points.id"), primary_key=True),
    Column("number", whole, primary_key=True),
    Column("epoch", whole, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("outcome", name(32)),
    Column("detail", text),
    Column("engines", text, nullable=False),
)

Table(
    "commands",
    metadata,
    Column("seq", whole, primary_key=True, autoincrement=True),
    Column("kind", name(32), nullable=False),
    Column("target", name(128), nullable=False),
    Column("detail", text),
    Column("created_at", Float, nullable=False),
    Column("done_at", Float),
    Index("commands_open", "done_at"),
)

Table(
    "drains",
    metadata,
    Column("id", name(36), primary_key=True),
    Column("run", ForeignKey("runs.run"), nullable=False),
    Column("planned", text, nullable=False),
    Column("on_timeout", name(16), nullable=False),
    Column("started_at", Float, nullable=False),
    Column("deadline", Float, nullable=False),
    Column("aborted_at", Float),
    Column("ended_at", Float),
    Column("receipt", text),
)


def upgrade() -> None:
    """Make the tables."""
    metadata.create_all(op.get_bind())
