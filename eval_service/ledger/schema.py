"""The ledger's tables (SQLAlchemy Core; SQLite and PostgreSQL alike). Times are Unix seconds; JSON is kept as text.

PostgreSQL is made to do as SQLite does: texts have no length that it enforces and are ordered by their bytes, and whole
numbers have 64 bits. A change here is a new `SCHEMA_VERSION` and a step in `migrations/versions`.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
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

SCHEMA_VERSION = 4
metadata = MetaData()

_BYTEWISE = Text(collation="C")
_text = Text().with_variant(_BYTEWISE, "postgresql")
_whole = Integer().with_variant(BigInteger(), "postgresql")


def _name(length: int) -> String:
    return String(length).with_variant(_BYTEWISE, "postgresql")


# What alembic knows the schema by; `meta` says it too, to versions that know no alembic.
alembic_version = Table("alembic_version", metadata, Column("version_num", String(32), primary_key=True))

# What there is one of: the schema's version, the epoch, the controller's sign of life, the fleet as last seen.
meta = Table(
    "meta",
    metadata,
    Column("key", _name(64), primary_key=True),
    Column("value", _text, nullable=False),
    Column("at", Float, nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("run", _name(128), primary_key=True),
    Column("spec", _text, nullable=False),
    Column("state", _name(16), nullable=False),
    Column("paused", Boolean, nullable=False, default=False),
    Column("resumed_at", Float),
    Column("step", _whole),
    Column("progress_at", Float),
    Column("created_at", Float, nullable=False),
    Column("deleted_at", Float),  # when that was asked for; the row goes with the last of its snapshots
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("id", _name(32), primary_key=True),
    Column("run", ForeignKey("runs.run"), nullable=False),
    Column("step", _whole, nullable=False),
    Column("path", _text, nullable=False),
    Column("source", _name(16), nullable=False),
    Column("claimed_digest", _name(32)),  # what the dispatch said; `digest` is what the checks found
    Column("digest", _name(32)),
    Column("tensor_digest", _name(32)),
    Column("nonce", _name(32)),
    Column("manifest", _text),
    Column("vocab_size", _whole),
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
    Column("path", _text, nullable=False),  # the directory that they are in
    Column("why_not", _text),  # why the snapshot can't be held, and is evaluated where it lies
)

points = Table(
    "points",
    metadata,
    Column("id", _name(32), primary_key=True),
    Column("seq", _whole, nullable=False, unique=True),  # the order in which they were asked for
    Column("run", ForeignKey("runs.run"), nullable=False),
    Column("step", _whole, nullable=False),
    Column("suite", _name(64), nullable=False),
    Column("reservation", _name(36), nullable=False),
    Column("kind", _name(16), nullable=False),
    Column("force", Boolean, nullable=False),
    Column("priority", _whole),  # None: the run's, whatever it is by then
    Column("source", _name(16), nullable=False),
    Column("state", _name(16), nullable=False),
    Column("reason", _name(32)),
    Column("detail", _text),
    Column("superseded", Boolean, nullable=False, default=False),
    Column("snapshot_id", ForeignKey("snapshots.id")),
    Column("attempts", _whole, nullable=False, default=0),
    Column("faults", _whole, nullable=False, default=0),  # attempts that an engine or the storage spoiled
    Column("weight_version", _name(64)),
    Column("pin_proof", _name(16)),
    Column("score", Float),
    Column("stderr", Float),
    Column("metrics", _text, nullable=False, default="{}"),
    Column("headline", _name(256)),  # the name of the metric that `score` is
    Column("direction", _name(8)),  # None: more of it is better
    Column("suite_digest", _name(32)),
    Column("alarms", _text),  # None: of a version that looked for none
    Column("samples_path", _text),
    Column("lag_steps", _whole),
    Column("timings", _text, nullable=False, default="{}"),
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
    Column("number", _whole, primary_key=True),
    Column("epoch", _whole, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("outcome", _name(32)),
    Column("detail", _text),
    Column("engines", _text, nullable=False, default="[]"),
)

# Ended points whose snapshot is served to people.
servings = Table(
    "servings",
    metadata,
    Column("point", ForeignKey("points.id"), primary_key=True),
    Column("asked_at", Float, nullable=False),
    Column("until", Float, nullable=False),
    Column("closed_at", Float),
    Column("engines", _whole, nullable=False),  # that serve it now
    Column("weight_version", _name(64)),
    Column("detail", _text),
)

# What a gateway asks of the controller.
commands = Table(
    "commands",
    metadata,
    Column("seq", _whole, primary_key=True, autoincrement=True),
    Column("kind", _name(32), nullable=False),
    Column("target", _name(128), nullable=False),
    Column("detail", _text),
    Column("created_at", Float, nullable=False),
    Column("done_at", Float),
    Index("commands_open", "done_at"),
)

drains = Table(
    "drains",
    metadata,
    Column("id", _name(36), primary_key=True),
    Column("run", _name(128), nullable=False),  # a receipt outlasts its run
    Column("planned", _text, nullable=False),
    Column("on_timeout", _name(16), nullable=False),
    Column("started_at", Float, nullable=False),
    Column("deadline", Float, nullable=False),
    Column("aborted_at", Float),
    Column("ended_at", Float),
    Column("receipt", _text),
)

# What became of things, in the order in which it was committed; the newest are kept, for whoever follows them.
events = Table(
    "events",
    metadata,
    Column("seq", _whole, primary_key=True, autoincrement=True),
    Column("kind", _name(16), nullable=False),
    Column("run", _name(128)),  # None: of the whole service
    Column("data", _text, nullable=False),
    Column("at", Float, nullable=False),
    sqlite_autoincrement=True,  # a number that was told is never told again, whatever was deleted
)

# How far each tracker, webhook and the traces have been told of the events, and what could not be told yet.
deliveries = Table(
    "deliveries",
    metadata,
    Column("name", _name(128), primary_key=True),
    Column("seq", _whole, nullable=False),
    Column("at", Float, nullable=False),
    Column("delivered", _whole, nullable=False),
    Column("refused", _whole, nullable=False),
    Column("failures", _whole, nullable=False),
    Column("error", _text),  # of the last try; None: it went well
)
late_deliveries = Table(
    "late_deliveries",
    metadata,
    Column("name", _name(128), primary_key=True),
    Column("seq", _whole, primary_key=True, autoincrement=False),  # of the event; below 0 that of a point
    Column("run", _name(128), nullable=False),
    Column("kind", _name(16), nullable=False),
    Column("data", _text, nullable=False),
    Column("at", Float, nullable=False),
    Column("tries", _whole, nullable=False),
    Column("next_at", Float, nullable=False),
)
