"""Types of columns as every step so far has them; a step that needs others brings its own."""

from __future__ import annotations

from sqlalchemy import BigInteger, Integer, String, Text

_BYTEWISE = Text(collation="C")
text = Text().with_variant(_BYTEWISE, "postgresql")
whole = Integer().with_variant(BigInteger(), "postgresql")


def name(length: int) -> String:
    """Its length is told to SQLite, which does not enforce it."""
    return String(length).with_variant(_BYTEWISE, "postgresql")
