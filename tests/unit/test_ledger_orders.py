"""Retry, cancel, backfill, hold, release, pause, resume, delete: asked of a gateway, carried out by the controller."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from eval_service.contract.errors import Conflict, NotFound
from eval_service.contract.states import ENDS, LIVE, PointState, Reason
from eval_service.contract.wire import DrainRequest
from eval_service.ledger.orders import not_on_storage
from tests.support.ledger import MAX_ATTEMPTS, Ledger, result

S = PointState


@pytest.fixture
def ledger(tmp_path: Path, database_url: str) -> Ledger:
    return Ledger(tmp_path, database_url)


# --- cancel


@pytest.mark.parametrize("state", sorted({S.RESERVED, S.QUEUED} | LIVE))
def test_an_open_point_is_taken_back_in_any_state(ledger: Ledger, state: PointState) -> None:
    point = ledger.reach(state)
    numbers = ledger.orders.cancel(point)
    assert ledger.state(point) is state, "a gateway moves no point"
    assert not ledger.views.carried_out(numbers)
    ledger.look()
    assert ledger.views.carried_out(numbers)
    assert (ledger.state(point), ledger.point(point).reason) == (S.CANCELLED, Reason.USER)
    if state in LIVE:
        assert ledger.point(point).history[-1].outcome == Reason.USER
    assert ledger.orders.cancel(point) == (), "a second time is as good"


@pytest.mark.parametrize("state", [S.DONE, S.FAILED, S.SKIPPED])
def test_what_has_ended_otherwise_cannot_be_taken_back(ledger: Ledger, state: PointState) -> None:
    point = ledger.reach(state)
    with pytest.raises(Conflict, match=f"it is {state}"):
        ledger.orders.cancel(point)


def test_a_result_that_comes_first_wins_over_the_cancel(ledger: Ledger) -> None:
    point = ledger.live(S.SCORING)
    numbers = ledger.orders.cancel(point)
    ledger.moves.finish(point, result())
    ledger.look()
    assert ledger.state(point) is S.DONE
    assert ledger.views.carried_out(numbers)


def test_a_run_is_taken_back_whole_and_no_other(ledger: Ledger) -> None:
    ledger.put_run("r2")
    done, running = ledger.done(1), ledger.live(S.RUNNING, 2)
    reserved = ledger.reserve(3, force=True).points[0].id
    other = ledger.queued(1, run="r2")
    asked = ledger.orders.cancel_run("r1")
    assert [ref.id for ref in asked.reply.points] == [running, reserved]
    ledger.look()
    assert [ledger.state(point) for point in (done, running, reserved)] == [S.DONE, S.CANCELLED, S.CANCELLED]
    assert ledger.state(other) is S.QUEUED
    assert [ref.state for ref in ledger.views.refreshed(asked.reply).points] == [S.CANCELLED] * 2
    assert ledger.orders.cancel_run("r1").reply.points == ()
    assert ledger.reserve(4).points[0].state is S.RESERVED, "the run goes on"


# --- retry


@pytest.mark.parametrize("state", sorted(ENDS - {S.DONE}))
def test_an_ended_point_is_tried_anew_with_all_its_attempts_and_time(ledger: Ledger, state: PointState) -> None:
    point = ledger.queued(1)
    for _ in range(MAX_ATTEMPTS - 1):
        ledger.go(point, S.RUNNING)
        ledger.moves.requeue(point, "engine", "it died")
    ledger.moves.end(point, state, {S.SKIPPED: Reason.UNHEALTHY, S.FAILED: Reason.DEADLINE}.get(state, Reason.USER), "")
    ledger.clock.turn(500)
    ledger.orders.retry(point)
    ledger.look()
    found = ledger.point(point)
    assert (found.state, found.reason, found.detail, found.ended_at) == (S.QUEUED, None, None, None)
    assert found.queued_at == ledger.clock.now
    assert ledger.moves.overdue(60) == []
    assert ledger.snapshot(1)["settled_at"] is None
    ledger.go(point, S.RUNNING)
    assert ledger.moves.requeue(point, "engine", "it died") is S.QUEUED
    ledger.go(point, S.DONE)
    assert [a.number for a in ledger.point(point).history] == list(range(1, MAX_ATTEMPTS + 2))


@pytest.mark.parametrize(
    ("state", "hint"),
    [(S.DONE, "another reservation"), (S.RUNNING, "has ended"), (S.QUEUED, "has ended"), (S.RESERVED, "has ended")],
)
def test_what_is_done_or_under_way_is_not_tried_again(ledger: Ledger, state: PointState, hint: str) -> None:
    point = ledger.reach(state)
    with pytest.raises(Conflict) as caught:
        ledger.orders.retry(point)
    assert hint in (caught.value.hint or "")


def test_without_its_snapshot_a_point_cannot_be_tried_again(ledger: Ledger) -> None:
    never = ledger.reserve(1).points[0].id
    ledger.orders.cancel(never)
    gone, deleted, outdone = (ledger.reach(S.FAILED, step) for step in (2, 3, 4))
    ledger.look()
    shutil.rmtree(ledger.path(2))
    assert ledger.retention.claim(ledger.snapshot(3)["id"])
    ledger.queued(4, "b" * 32)
    for point, why in ((never, "ever came"), (gone, "not there"), (deleted, "deleted"), (outdone, "newer point")):
        with pytest.raises(Conflict, match=why) as caught:
            ledger.orders.retry(point, not_on_storage(ledger.orders.place_of(point)))
        assert caught.value.hint
    with pytest.raises(NotFound):
        ledger.orders.retry("nothing")


def test_a_retry_that_was_granted_keeps_the_snapshot_until_it_is_carried_out(ledger: Ledger) -> None:
    point = ledger.reach(S.FAILED)
    ledger.orders.retry(point)
    assert not ledger.retention.claim(ledger.snapshot(1)["id"])
    ledger.look()
    assert not ledger.retention.claim(ledger.snapshot(1)["id"])
    assert ledger.state(point) is S.QUEUED


def test_a_point_whose_snapshot_was_refused_is_checked_again(ledger: Ledger) -> None:
    (ref,) = ledger.send(1).points
    ledger.look()
    ledger.moves.refuse(ledger.moves.unadmitted()[0].id, Reason.CKPT_MISSING, "no marker")
    ledger.orders.retry(ref.id)
    ledger.look()
    assert [item.step for item in ledger.moves.unadmitted()] == [1]


def test_cancel_and_retry_in_one_look_are_done_in_their_order(ledger: Ledger) -> None:
    point = ledger.live(S.RUNNING)
    ledger.orders.cancel(point)
    ledger.look()
    ledger.orders.retry(point)
    ledger.orders.cancel(ledger.queued(2))
    ledger.look()
    assert ledger.states() == [(1, "main", S.QUEUED), (2, "main", S.CANCELLED)]
    assert ledger.moves.overtaken([point]) == [point], "its lane was of the attempt before"


# --- backfill


def test_backfill_tries_again_what_was_skipped_or_failed_and_tells_what_it_left(ledger: Ledger) -> None:
    able = [ledger.reach(state, step) for step, state in ((1, S.FAILED), (2, S.SKIPPED))]
    ledger.done(3)
    ledger.reach(S.CANCELLED, 4)
    ledger.reach(S.FAILED, 5)
    ledger.done(5, "b" * 32)
    shutil.rmtree(ledger.path(1, "c" * 32))
    never = ledger.reach(S.RESERVED, 6)
    ledger.orders.report_export_failed(never, "disk full")
    ledger.look()
    asked = ledger.orders.backfill("r1", not_on_storage(ledger.orders.places_of("r1")))
    assert [ref.id for ref in asked.reply.points] == able
    assert [(left.step, left.why) for left in asked.reply.left] == [(6, "no snapshot of it ever came")]
    ledger.look()
    assert [ledger.state(point) for point in able] == [S.QUEUED] * 2
    again = ledger.orders.backfill("r1")
    assert (again.reply.points, again.numbers) == ((), ())


def test_what_gave_way_can_be_backfilled(ledger: Ledger) -> None:
    ledger.put_run(overflow="latest", max_in_flight=1)
    point = ledger.queued(1)
    ledger.reserve(2)
    ledger.look()
    assert ledger.state(point) is S.SKIPPED
    ledger.orders.backfill("r1")
    ledger.look()
    assert ledger.state(point) is S.QUEUED


# --- hold and release


def test_a_held_snapshot_is_not_collected_until_it_is_released(ledger: Ledger) -> None:
    point = ledger.done(1)
    snapshot = ledger.snapshot(1)["id"]
    ledger.orders.hold(point)
    assert ledger.point(point).held
    assert ledger.retention.on_storage()[0].held
    assert not ledger.retention.claim(snapshot)
    ledger.orders.release(point)
    assert not ledger.point(point).held
    assert ledger.retention.claim(snapshot)
    with pytest.raises(Conflict, match="is deleted"):
        ledger.orders.hold(point)


def test_only_a_snapshot_that_came_can_be_held(ledger: Ledger) -> None:
    point = ledger.reach(S.RESERVED)
    with pytest.raises(Conflict, match="no snapshot"):
        ledger.orders.hold(point)


# --- pause and resume


def test_a_paused_run_starts_no_lane_but_takes_everything_in(ledger: Ledger) -> None:
    ledger.put_run("r2")
    running, queued, other = ledger.live(S.RUNNING, 1), ledger.queued(2), ledger.queued(1, run="r2")
    ledger.orders.pause("r1")
    assert ledger.views.run("r1").state == "paused"
    assert [point.id for point in ledger.moves.runnable()] == [other]
    assert ledger.moves.advance(running, S.SCORING)
    ledger.queued(3)
    assert ledger.views.run("r1").state == "paused", "a dispatch does not end a pause"
    ledger.orders.resume("r1")
    assert ledger.views.run("r1").state == "active"
    assert len(ledger.moves.runnable()) == 3
    assert ledger.state(queued) is S.QUEUED


def test_a_pause_stops_the_time_of_what_waits_and_not_of_what_runs(ledger: Ledger) -> None:
    waits, runs = ledger.queued(1), ledger.live(S.RUNNING, 2)
    ledger.orders.pause("r1")
    ledger.clock.turn(100)
    assert ledger.moves.overdue(60) == [runs]
    ledger.orders.resume("r1")
    assert ledger.moves.overdue(60) == []
    ledger.clock.turn(61)
    assert set(ledger.moves.overdue(60)) == {waits, runs}


def test_a_drain_does_not_end_a_pause(ledger: Ledger) -> None:
    ledger.orders.pause("r1")
    ledger.intents.begin_drain(DrainRequest(run="r1"))
    ledger.look()
    assert ledger.views.run("r1").state == "paused"
    ledger.orders.resume("r1")
    assert ledger.views.run("r1").state == "drained"


def test_pause_and_resume_may_be_repeated(ledger: Ledger) -> None:
    for _ in range(2):
        ledger.orders.pause("r1")
    for _ in range(2):
        ledger.orders.resume("r1")
    with pytest.raises(NotFound):
        ledger.orders.pause("unheard")


# --- delete


def test_a_deleted_runs_open_points_are_cancelled_and_it_takes_nothing_in(ledger: Ledger) -> None:
    ledger.put_run("r2")
    points = [ledger.live(S.RUNNING, 1), ledger.queued(2), ledger.reserve(3, force=True).points[0].id]
    other = ledger.queued(1, run="r2")
    for _ in range(2):
        ledger.orders.delete_run("r1")
    assert ledger.views.run("r1").state == "deleting"
    ledger.look()
    assert {(ledger.state(point), ledger.point(point).reason) for point in points} == {
        (S.CANCELLED, Reason.RUN_DELETED)
    }
    assert ledger.state(other) is S.QUEUED
    for attempt in (
        lambda: ledger.reserve(4),
        lambda: ledger.put_run("r1"),
        lambda: ledger.orders.pause("r1"),
        lambda: ledger.orders.backfill("r1"),
        lambda: ledger.orders.retry(points[0]),
        lambda: ledger.orders.hold(points[0]),
    ):
        with pytest.raises(Conflict, match="delete"):
            attempt()


def test_a_run_with_a_held_snapshot_is_not_deleted(ledger: Ledger) -> None:
    point = ledger.done(7)
    ledger.orders.hold(point)
    with pytest.raises(Conflict, match="step 7 is held"):
        ledger.orders.delete_run("r1")
    ledger.orders.release(point)
    ledger.orders.delete_run("r1")


def test_a_deleted_run_is_forgotten_once_all_has_ended_and_its_receipts_last(ledger: Ledger) -> None:
    ledger.done(1)
    drain = ledger.intents.begin_drain(DrainRequest(run="r1"))
    ledger.look()
    ledger.live(S.RUNNING, 2)
    ledger.orders.delete_run("r1")
    assert not ledger.retention.forget("r1")
    ledger.look()
    assert ledger.retention.forget("r1")
    with pytest.raises(NotFound):
        ledger.views.run("r1")
    assert ledger.views.points().total == 0
    assert ledger.views.receipt(drain).drained
    ledger.put_run("r1")
    assert ledger.views.run("r1").points == {}


def test_nobody_forgets_a_run_that_was_not_deleted(ledger: Ledger) -> None:
    ledger.done(1)
    assert not ledger.retention.forget("r1")
    assert len(ledger.states()) == 1
