"""What the controller looks at all the time costs the same, however many points have ended."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from benchmarks.stocked import Stock
from eval_service.ledger.database import Database
from eval_service.ledger.moves import Moves
from eval_service.ledger.servings import ServingMoves

LOOKS: dict[str, Callable[[Database, Moves], Any]] = {
    "changes": lambda _, moves: moves.changes(),
    "unadmitted": lambda _, moves: moves.unadmitted(),
    "runnable": lambda _, moves: moves.runnable(),
    "time": lambda _, moves: moves.time_matters(),
    "overdue": lambda _, moves: moves.overdue(3600.0),
    "strays": lambda _, moves: moves.strays([]),
    "drains": lambda _, moves: moves.tend_drains(),
    "intents": lambda _, moves: moves.take_intents(reservation_timeout_s=1800.0),
    "servings": lambda database, moves: ServingMoves(database, moves.epoch).look(),
}
OPS = 10  # of SQLite's virtual machine, to one count
_FEW, _MANY = 10, 400


def cost(look: str, directory: Path, steps: int) -> int:
    """Operations of SQLite's virtual machine that a look takes, beside so many ended points of each of two runs."""
    directory.mkdir()
    url = f"sqlite:///{directory / 'ledger.db'}"
    Stock(runs=2, steps=steps, manifest_bytes=10).write(url, directory / "runs")
    database, count = Database(url), 0
    moves = Moves(database, database.take_epoch(), max_attempts=3)

    def one_more() -> int:
        nonlocal count
        count += 1
        return 0

    @event.listens_for(database.engine, "checkout")
    def watch(connection: sqlite3.Connection, *_: object) -> None:
        connection.set_progress_handler(one_more, OPS)

    try:
        LOOKS[look](database, moves)
    finally:
        moves.close()
        database.close()
    return count


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_costs_the_same_beside_forty_times_as_many_ended_points(look: str, tmp_path: Path) -> None:
    few, many = (cost(look, tmp_path / str(steps), steps) for steps in (_FEW, _MANY))
    assert many <= few + 2 + few // 4, f"{OPS * few} operations become {OPS * many}"
