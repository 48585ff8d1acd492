"""The ledger's tables (SQLAlchemy Core; SQLite and PostgreSQL alike). Times are Unix seconds; JSON is kept as text."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

SCHEMA_VERSION = 3
metadata = MetaData()

# What there is one of: the schema's version, the epoch, the controller's sign of life, the fleet as last seen.
meta = Table(
    "meta",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
    Column("at", Float, nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("run", String(128), primary_key=True),
    Column("spec", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("paused", Boolean, nullable=False, default=False),
    Column("resumed_at", Float),
    Column("step", Integer),
    Column("progress_at", Float),
    Column("created_at", Float, nullable=False),
    Column("deleted_at", Float),  # when that was asked for; the row goes with the last of its snapshots
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("run", ForeignKey("runs.run"), nullable=False),
    Column("step", Integer, nullable=False),
    Column("path", Text, nullable=False),
    Column("source", String(16), nullable=False),
    Column("claimed_digest", String(32)),  # what the dispatch said; `digest` is what the checks found
    Column("digest", String(32)),
    Column("tensor_digest", String(32)),
    Column("nonce", String(32)),
    Column("manifest", Text),
    Column("vocab_size", Integer),
    Column("admitted_at", Float),
    Column("created_at", Float, nullable=False),
    Column("settled_at", Float),
    Column("deleting_at", Float),  # claimed for deletion: nobody may come to need it any more
    Column("deleted_at", Float),
    Column("held", Boolean, nullable=False, default=False),
    UniqueConstraint("run", "step", "path"),
    Index("snapshots_on_storage", "deleted_at"),
)

# Hard links to a snapshot that is not ours to keep, from when it is queued until it settles.
links = Table(
    "links",
    metadata,
    Column("snapshot", ForeignKey("snapshots.id"), primary_key=True),
    Column("path", Text, nullable=False),  # the directory that they are in
    Column("why_not", Text),  # why the snapshot can't be held, and is evaluated where it lies
)

points = Table(
    "points",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("seq", Integer, nullable=False, unique=True),  # the order in which they were asked for
    Column("run", ForeignKey("runs.run"), nullable=False),
    Column("step", Integer, nullable=False),
    Column("suite", String(64), nullable=False),
    Column("reservation", String(36), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("force", Boolean, nullable=False),
    Column("priority", Integer),  # None: the run's, whatever it is by then
    Column("source", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", String(32)),
    Column("detail", Text),
    Column("superseded", Boolean, nullable=False, default=False),
    Column("snapshot_id", ForeignKey("snapshots.id")),
    Column("attempts", Integer, nullable=False, default=0),
    Column("faults", Integer, nullable=False, default=0),  # attempts that an engine or the storage spoiled
    Column("weight_version", String(64)),
    Column("pin_proof", String(16)),
    Column("score", Float),
    Column("stderr", Float),
    Column("metrics", Text, nullable=False, default="{}"),
    Column("headline", String(256)),  # the name of the metric that `score` is
    Column("direction", String(8)),  # None: more of it is better
    Column("suite_digest", String(32)),
    Column("alarms", Text),  # None: of a version that looked for none
    Column("samples_path", Text),
    Column("lag_steps", Integer),
    Column("timings", Text, nullable=False, default="{}"),
    Column("created_at", Float, nullable=False),
    Column("queued_at", Float),
    Column("started_at", Float),
    Column("ended_at", Float),
    UniqueConstraint("reservation", "suite"),
    Index("points_by_run", "run", "step", "suite"),
    Index("points_by_run_state", "run", "state"),
    Index("points_by_state", "state", "reason"),
    Index("points_by_snapshot", "snapshot_id"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("point", ForeignKey("points.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("epoch", Integer, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("outcome", String(32)),
    Column("detail", Text),
    Column("engines", Text, nullable=False, default="[]"),
)

# Ended points whose snapshot is served to people.
servings = Table(
    "servings",
    metadata,
    Column("point", ForeignKey("points.id"), primary_key=True),
    Column("asked_at", Float, nullable=False),
    Column("until", Float, nullable=False),
    Column("closed_at", Float),
    Column("engines", Integer, nullable=False),  # that serve it now
    Column("weight_version", String(64)),
    Column("detail", Text),
)

# What a gateway asks of the controller.
commands = Table(
    "commands",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("kind", String(32), nullable=False),
    Column("target", String(128), nullable=False),
    Column("detail", Text),
    Column("created_at", Float, nullable=False),
    Column("done_at", Float),
    Index("commands_open", "done_at"),
)

drains = Table(
    "drains",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("run", String(128), nullable=False),  # a receipt outlasts its run
    Column("planned", Text, nullable=False),
    Column("on_timeout", String(16), nullable=False),
    Column("started_at", Float, nullable=False),
    Column("deadline", Float, nullable=False),
    Column("aborted_at", Float),
    Column("ended_at", Float),
    Column("receipt", Text),
)

# What became of things, in the order in which it was committed; the newest are kept, for whoever follows them.
events = Table(
    "events",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("kind", String(16), nullable=False),
    Column("run", String(128)),  # None: of the whole service
    Column("data", Text, nullable=False),
    Column("at", Float, nullable=False),
    sqlite_autoincrement=True,  # a number that was told is never told again, whatever was deleted
)

# How far each tracker, webhook and the traces have been told of the events, and what could not be told yet.
deliveries = Table(
    "deliveries",
    metadata,
    Column("name", String(128), primary_key=True),
    Column("seq", Integer, nullable=False),
    Column("at", Float, nullable=False),
    Column("delivered", Integer, nullable=False),
    Column("refused", Integer, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("error", Text),  # of the last try; None: it went well
)
late_deliveries = Table(
    "late_deliveries",
    metadata,
    Column("name", String(128), primary_key=True),
    Column("seq", Integer, primary_key=True, autoincrement=False),  # of the event; below 0 that of a point
    Column("run", String(128), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("data", Text, nullable=False),
    Column("at", Float, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("next_at", Float, nullable=False),
)

# What each version added to tables that were there already: columns that may be null, so older rows stay as they are.
ADDED: dict[int, tuple[Column[Any], ...]] = {
    3: (points.c.headline, points.c.direction, points.c.suite_digest, points.c.alarms),
}
