"""Receipts: what finished, what did not and why; many callers, restarts of anything, and a deadline that holds."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from eval_service.contract.errors import Conflict, NotFound
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import DrainRequest, Receipt
from eval_service.ledger.database import CONTROLLER_SILENT_S
from tests.support.ledger import EXPIRY_S, Ledger

S = PointState


@pytest.fixture
def ledger(tmp_path: Path, database_url: str) -> Ledger:
    return Ledger(tmp_path, database_url)


def begin(ledger: Ledger, **changes: Any) -> str:
    values = {"run": "r1", "timeout_s": 60.0} | changes
    return ledger.intents.begin_drain(DrainRequest.model_validate(values))


def planned(*steps: int) -> list[dict[str, Any]]:
    return [{"step": step, "suite": "main"} for step in steps]


def lists(receipt: Receipt) -> dict[str, list[int]]:
    names = ("done", "skipped", "failed", "cancelled", "pending", "never_came")
    return {name: steps for name in names if (steps := [line.step for line in getattr(receipt, name)])}


def test_the_receipt_lists_every_point_with_its_reason(ledger: Ledger) -> None:
    ledger.done(1)
    for step, state in enumerate((S.SKIPPED, S.FAILED, S.CANCELLED), start=2):
        ledger.reach(state, step)
    drain = begin(ledger, planned=planned(1, 2, 3, 4, 9))
    receipt = ledger.views.receipt(drain)
    assert (receipt.open, receipt.drained, receipt.timed_out) == (False, True, False)
    assert lists(receipt) == {"done": [1], "skipped": [2], "failed": [3], "cancelled": [4], "never_came": [9]}
    assert [receipt.skipped[0].reason, receipt.skipped[0].detail] == [Reason.UNHEALTHY, "as the test wants it"]
    assert receipt.done[0].reason is None


def test_a_drain_waits_for_what_is_open_and_no_longer(ledger: Ledger) -> None:
    point = ledger.queued(1)
    drain = begin(ledger)
    assert ledger.views.receipt(drain).open
    assert ledger.views.receipt(drain).pending[0].reason == S.QUEUED
    ledger.go(point, S.DONE)
    assert not ledger.views.receipt(drain).open
    assert lists(ledger.views.receipt(drain)) == {"done": [1]}


def test_time_that_is_up_leaves_the_rest_to_the_service(ledger: Ledger) -> None:
    point = ledger.live(S.RUNNING)
    drain = begin(ledger, planned=planned(1, 2))
    ledger.clock.turn(60)
    ledger.look()
    receipt = ledger.views.receipt(drain)
    assert (receipt.open, receipt.drained, receipt.timed_out) == (False, False, True)
    assert lists(receipt) == {"pending": [1], "never_came": [2]}
    assert ledger.state(point) is S.RUNNING
    assert ledger.views.run("r1").state == "active"


def test_abort_cancels_what_is_left_at_the_deadline(ledger: Ledger) -> None:
    ledger.put_run("r2")
    points = [ledger.live(S.RUNNING, 1), ledger.queued(2), ledger.reserve(3, force=True).points[0].id]
    other = ledger.queued(1, run="r2")
    drain = begin(ledger, on_timeout="abort")
    ledger.clock.turn(59)
    ledger.look()
    assert ledger.state(points[0]) is S.RUNNING
    ledger.clock.turn(1)
    assert ledger.views.receipt(drain).open, "the controller has yet to cancel"
    ledger.look()
    receipt = ledger.views.receipt(drain)
    assert (receipt.open, receipt.drained, receipt.timed_out) == (False, True, True)
    assert lists(receipt) == {"cancelled": [1, 2, 3]}
    assert {line.reason for line in receipt.cancelled} == {Reason.DRAIN_TIMEOUT}
    assert ledger.state(other) is S.QUEUED


def test_abort_does_not_wait_for_a_controller_that_is_dead_and_is_done_when_one_comes(ledger: Ledger) -> None:
    point = ledger.queued(1)
    drain = begin(ledger, on_timeout="abort")
    ledger.clock.turn(60 + 2 * CONTROLLER_SILENT_S + 1)
    assert not ledger.views.receipt(drain).open
    ledger.intents.end_drain(drain)
    assert lists(ledger.views.receipt(drain)) == {"pending": [1]}
    ledger.take_over()
    ledger.look()
    assert ledger.point(point).reason is Reason.DRAIN_TIMEOUT


def test_a_drain_that_was_over_in_time_aborts_nothing_later(ledger: Ledger) -> None:
    """The next launch of the run would lose its points to the deadline of the last one."""
    ledger.done(1)
    begin(ledger, on_timeout="abort")
    ledger.look()
    later = ledger.queued(2)
    ledger.clock.turn(3600)
    ledger.look()
    assert ledger.state(later) is S.QUEUED


def test_a_dispatch_after_the_deadline_is_not_aborted_with_the_rest(ledger: Ledger) -> None:
    ledger.queued(1)
    begin(ledger, on_timeout="abort")
    ledger.clock.turn(61)
    later = ledger.queued(2)
    ledger.look()
    assert ledger.states() == [(1, "main", S.CANCELLED), (2, "main", S.QUEUED)]
    assert ledger.state(later) is S.QUEUED


def test_many_callers_under_one_id_share_one_drain(ledger: Ledger) -> None:
    drain = str(uuid.uuid4())
    assert {begin(ledger, drain=drain, timeout_s=wait) for wait in (60.0, 5.0, 600.0)} == {drain}
    assert ledger.views.receipt(drain).deadline == ledger.clock.now + 60
    ledger.put_run("r2")
    with pytest.raises(Conflict):
        begin(ledger, drain=drain, run="r2")


def test_drains_of_one_run_end_each_with_its_own_receipt(ledger: Ledger) -> None:
    point = ledger.queued(1)
    short, long = begin(ledger, timeout_s=5.0), begin(ledger, planned=planned(1))
    ledger.clock.turn(6)
    ledger.look()
    assert ledger.views.receipt(short).timed_out
    assert ledger.views.receipt(long).open
    ledger.go(point, S.DONE)
    ledger.look()
    assert ledger.views.receipt(long).drained
    assert not ledger.views.receipt(short).drained


def test_the_receipt_is_kept_as_it_was_and_can_be_fetched_later(ledger: Ledger) -> None:
    ledger.done(1)
    drain = begin(ledger)
    ledger.look()
    kept = ledger.views.receipt(drain)
    ledger.clock.turn(1000)
    ledger.queued(2)
    ledger.intents.end_drain(drain)
    ledger.take_over()
    ledger.look()
    assert ledger.views.receipt(drain) == kept
    assert kept.ended_at == 1000.0


def test_a_gateway_ends_a_drain_itself_when_no_controller_is_there(ledger: Ledger) -> None:
    ledger.done(1)
    drain = begin(ledger)
    ledger.clock.turn(5)
    ledger.intents.end_drain(drain)
    assert ledger.views.receipt(drain).ended_at == 1005.0
    assert ledger.views.run("r1").state == "drained"


def test_nobody_ends_a_drain_early(ledger: Ledger) -> None:
    ledger.queued(1)
    drain = begin(ledger)
    ledger.intents.end_drain(drain)
    assert ledger.views.receipt(drain).open
    assert ledger.views.run("r1").state == "active"


def test_a_dispatch_after_drain_reopens_the_run(ledger: Ledger) -> None:
    begin(ledger)
    ledger.look()
    assert ledger.views.run("r1").state == "drained"
    ledger.reserve(1)
    assert ledger.views.run("r1").state == "active"


def test_the_newest_point_of_a_step_is_the_one_that_counts(ledger: Ledger) -> None:
    ledger.done(1)
    ledger.queued(1, "b" * 32)
    drain = begin(ledger, planned=planned(1))
    assert lists(ledger.views.receipt(drain)) == {"pending": [1]}
    ledger.go(ledger.moves.runnable()[0].id, S.DONE)
    assert lists(ledger.views.receipt(drain)) == {"done": [1]}


def test_a_point_whose_snapshot_came_counts_before_a_later_one_that_had_none(ledger: Ledger) -> None:
    done = ledger.done(1)
    ledger.queued(5)
    ledger.queued(6)
    ledger.reserve(1)  # over the bound: skipped
    (line,) = ledger.views.receipt(begin(ledger)).done
    assert line.point == done


def test_a_reservation_that_a_later_point_outdid_holds_no_drain_up(ledger: Ledger) -> None:
    """The trainer that made it is dead; its successor's point is done."""
    ledger.reserve(1)
    ledger.done(1)
    drain = begin(ledger)
    assert not ledger.views.receipt(drain).open
    assert lists(ledger.views.receipt(drain)) == {"done": [1]}


def test_a_reservation_that_nobody_used_ends_the_drain_when_it_expires(ledger: Ledger) -> None:
    ledger.reserve(1)
    drain = begin(ledger, timeout_s=2 * EXPIRY_S, planned=planned(1))
    assert ledger.views.receipt(drain).open
    ledger.clock.turn(EXPIRY_S + 1)
    ledger.look()
    assert lists(ledger.views.receipt(drain)) == {"skipped": [1]}


def test_no_such_drain_and_no_such_run_are_told(ledger: Ledger) -> None:
    with pytest.raises(NotFound):
        ledger.views.receipt("nothing")
    with pytest.raises(NotFound):
        begin(ledger, run="unheard")


def test_a_receipt_is_json_that_any_reader_takes(ledger: Ledger) -> None:
    ledger.done(1)
    found = ledger.views.receipt(begin(ledger))
    assert Receipt.model_validate(json.loads(found.model_dump_json())) == found
