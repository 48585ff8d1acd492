"""However commands, faults and controllers come together, a point is tried by one attempt at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from eval_service.contract.errors import Conflict
from eval_service.contract.states import ENDS, LIVE, PointState, Reason
from eval_service.ledger.database import Fenced
from eval_service.ledger.moves import Moves
from eval_service.ledger.schema import attempts
from tests.support.ledger import Ledger, result
from tests.support.properties import steady

S = PointState
LANES: dict[str, Callable[[Moves, str], object]] = {
    "begin": lambda moves, point: moves.begin_attempt(point),
    "run": lambda moves, point: moves.advance(point, S.RUNNING),
    "score": lambda moves, point: moves.advance(point, S.SCORING),
    "fault": lambda moves, point: moves.requeue(point, "internal", "by chance"),
    "finish": lambda moves, point: moves.finish(point, result()),
    "end": lambda moves, point: moves.end(point, S.FAILED, Reason.DEADLINE, "by chance"),
}
IN_ORDER = {"run": S.PINNING, "score": S.RUNNING}  # a lane goes on from nowhere else
steps = count(1)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    ledger = Ledger(tmp_path_factory.mktemp("attempts"))
    ledger.put_run(max_in_flight=10_000)
    return ledger


def check(ledger: Ledger, point: str) -> None:
    """At most one attempt is open: that of the controller that acts, and only while the point is being tried."""
    with ledger.db.reading() as connection:
        rows = connection.execute(select(attempts).where(attempts.c.point == point)).mappings().all()
    view = ledger.point(point)
    now = [(row["number"], row["epoch"]) for row in rows if row["ended_at"] is None]
    assert now == ([(view.attempts, ledger.moves.epoch)] if view.state in LIVE else [])
    assert len({row["number"] for row in rows}) == len(rows) == view.attempts
    assert sum(row["outcome"] == "done" for row in rows) == (view.state is S.DONE)


@settings(steady, max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from([*LANES, "cancel", "retry", "another controller"]), st.booleans()),
        min_size=4,
        max_size=16,
    )
)
def test_no_point_has_two_live_attempts(ledger: Ledger, moves: list[tuple[str, bool]]) -> None:
    point, former = ledger.queued(next(steps)), ledger.moves
    for what, by_the_former in moves:
        if IN_ORDER.get(what, ledger.state(point)) is not ledger.state(point):
            continue
        if what in LANES:
            acts = former if by_the_former else ledger.moves
            with suppress(Fenced):
                LANES[what](acts, point)
                assert acts.epoch == ledger.moves.epoch, "a former controller writes nothing"
        elif what == "another controller":
            former = ledger.moves
            ledger.take_over().recover()
        else:
            with suppress(Conflict):
                (ledger.orders.cancel if what == "cancel" else ledger.orders.retry)(point)
            ledger.look()
        check(ledger, point)
    if ledger.state(point) not in ENDS:
        ledger.moves.end(point, S.CANCELLED, Reason.USER, "the example is over")
