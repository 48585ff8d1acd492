"""Dispatches that come together share a transaction, and each keeps what it was promised alone."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection, event

from eval_service.contract.errors import Busy, Conflict, Unavailable
from eval_service.contract.wire import DispatchReply, DispatchRequest, Granted
from eval_service.ledger import grouped
from eval_service.ledger.grouped import GroupedWrites
from tests.support.ledger import Ledger

_WAIT_S = 30.0


@pytest.fixture
def ledger(tmp_path: Path, database_url: str) -> Ledger:
    return Ledger(tmp_path, database_url)


@pytest.fixture
def writes(ledger: Ledger) -> Iterator[GroupedWrites]:
    found = GroupedWrites(ledger.db)
    yield found
    found.close()


def dispatch(ledger: Ledger, step: int, **changes: object) -> Callable[[Connection], DispatchReply]:
    values = {"run": "r1", "step": step, "reservation": str(uuid.uuid4()), "wait_s": 0.0} | changes
    request = DispatchRequest.model_validate(values)
    return partial(ledger.intents.dispatch_within, request=request, path=None)


def together(writes: GroupedWrites, *work: Callable[[Connection], DispatchReply]) -> list[Future[DispatchReply]]:
    """Submit all while the thread that writes is held, so that they wait together."""
    with held(writes):
        return [writes.submit(one) for one in work]


@contextmanager
def held(writes: GroupedWrites) -> Iterator[None]:
    """The thread that writes is at work for somebody else, and takes nothing meanwhile."""
    begun, go_on = threading.Event(), threading.Event()

    def first(_connection: Connection) -> None:
        begun.set()
        assert go_on.wait(_WAIT_S)

    writes.submit(first)
    assert begun.wait(_WAIT_S)
    try:
        yield
    finally:
        go_on.set()


def test_what_waits_together_is_committed_once(ledger: Ledger, writes: GroupedWrites) -> None:
    ledger.put_run(max_in_flight=100)
    commits: list[int] = []
    event.listen(ledger.db.engine, "commit", lambda _: commits.append(1))
    futures = together(writes, *(dispatch(ledger, step) for step in range(20)))
    assert {future.result(_WAIT_S).outcome for future in futures} == {Granted.GRANTED}
    assert len(ledger.states()) == 20
    assert len(commits) == 2, "the first's, and that of the rest"


def test_one_that_fails_is_undone_alone_and_told_to_its_caller_alone(ledger: Ledger, writes: GroupedWrites) -> None:
    ledger.put_run(max_in_flight=100)

    def fails_late(connection: Connection) -> DispatchReply:
        dispatch(ledger, 7)(connection)
        raise Conflict("after it wrote")

    before, bad, after = together(writes, dispatch(ledger, 1), fails_late, dispatch(ledger, 2))
    assert (before.result(_WAIT_S).step, after.result(_WAIT_S).step) == (1, 2)
    with pytest.raises(Conflict, match="after it wrote"):
        bad.result(_WAIT_S)
    assert [point.step for point in ledger.views.points(run="r1").points] == [1, 2]


def test_the_bound_holds_among_those_of_one_transaction(ledger: Ledger, writes: GroupedWrites) -> None:
    ledger.put_run(max_in_flight=2)
    futures = together(writes, *(dispatch(ledger, step, wait_s=None) for step in range(4)))
    outcomes = [future.exception(_WAIT_S) for future in futures]
    assert [type(outcome) for outcome in outcomes] == [type(None), type(None), Busy, Busy]


def test_one_uuid_that_comes_twice_at_once_is_one_point(ledger: Ledger, writes: GroupedWrites) -> None:
    same = dispatch(ledger, 1)
    first, second = (future.result(_WAIT_S) for future in together(writes, same, same))
    assert (first.outcome, second.outcome) == (Granted.GRANTED, Granted.KNOWN)
    assert first.points[0].id == second.points[0].id


def test_nobody_is_answered_when_the_commit_fails(ledger: Ledger, writes: GroupedWrites) -> None:
    def broken(_connection: Connection) -> None:
        raise Unavailable("the disk is full")

    event.listen(ledger.db.engine, "commit", broken)
    (future,) = (writes.submit(dispatch(ledger, 1)),)
    with pytest.raises(Unavailable, match="disk is full"):
        future.result(_WAIT_S)
    event.remove(ledger.db.engine, "commit", broken)
    assert ledger.states() == []
    assert writes.submit(dispatch(ledger, 1)).result(_WAIT_S).outcome is Granted.GRANTED


def test_a_disk_that_is_full_for_one_of_them_is_told_to_all_since_nothing_was_kept(
    ledger: Ledger, writes: GroupedWrites
) -> None:
    def too_much(connection: Connection) -> DispatchReply:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("DO $$ BEGIN RAISE 'the disk is full' USING ERRCODE = 'disk_full'; END $$")
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")
        connection.exec_driver_sql("INSERT INTO meta VALUES ('much', hex(zeroblob(1000000)), 0)")
        raise AssertionError("there was room")

    ledger.put_run(max_in_flight=100)
    before, after = dispatch(ledger, 1), dispatch(ledger, 2)
    for future in together(writes, before, too_much, after):
        with pytest.raises(Unavailable, match="full"):
            future.result(_WAIT_S)
    assert ledger.views.points(run="r1").total == 0


def test_too_many_that_wait_are_refused_and_not_kept(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "MOST_WAITING", 2)
    writes = GroupedWrites(ledger.db)
    refused = 0
    with held(writes):
        for step in range(100):
            try:
                writes.submit(dispatch(ledger, step))
            except Unavailable:
                refused += 1
    writes.close()
    assert refused == 98
