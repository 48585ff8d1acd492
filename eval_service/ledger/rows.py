"""Rows one by one: what is wrong with one of them is told, and keeps nobody from the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from sqlalchemy import Connection, RowMapping
from sqlalchemy.exc import DBAPIError

from eval_service.ledger.database import Fenced

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Row = TypeVar("_Row", RowMapping, str)


def sound(rows: Iterable[RowMapping], make: Callable[[RowMapping], _T]) -> Iterator[_T]:
    """What can be made of the rows."""
    for row in rows:
        try:
            made = make(row)
        except (ValueError, KeyError, TypeError):
            log.exception("a row of the ledger can't be read: %s", dict(row))
            continue
        yield made


def carry_out(connection: Connection, rows: Iterable[_Row], step: Callable[[_Row], None]) -> int:
    """Do something for each row, within the transaction; what fails for one is undone. Returns how many."""
    count = 0
    for row in rows:
        count += 1
        try:
            with connection.begin_nested():
                step(row)
        except (DBAPIError, Fenced):
            raise
        except Exception:  # the row's edge: it is tried again with the next occasion
            log.exception("it can't be carried out for %s", row if isinstance(row, str) else dict(row))
    return count
