"""Brings a ledger of an older version up to date, step by step, with alembic; what a step does is in `versions`.

A new ledger is made from `schema.py` at once; a test sees that both ways lead to the same tables.
"""

from __future__ import annotations

import threading
from pathlib import Path

from sqlalchemy import Connection, inspect

_HERE = Path(__file__).parent
_ALONE = threading.Lock()  # alembic's context is the process's


def migrate(connection: Connection, found: int) -> None:
    """Take the steps from schema `found` to the newest, within the caller's transaction."""
    from alembic import command  # only here: a ledger that is up to date needs none of it
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_HERE).replace("%", "%%"))
    config.attributes["connection"] = connection
    with _ALONE:
        if "alembic_version" not in inspect(connection).get_table_names():
            command.stamp(config, f"{found:04}")
        command.upgrade(config, "head")
