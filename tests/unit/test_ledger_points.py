"""The life of a point in the ledger: the controller walks the table, and nobody else moves a point."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from eval_service.contract.states import ENDS, LIVE, REASONS, TRANSITIONS, PinProof, PointState, Reason
from eval_service.contract.wire import Metric
from eval_service.ledger.turn import turn
from tests.support.ledger import MAX_ATTEMPTS, REASON_OF, Ledger, result

S = PointState


@pytest.fixture
def ledger(tmp_path: Path, database_url: str) -> Ledger:
    return Ledger(tmp_path, database_url)


@pytest.mark.parametrize("old", PointState)
def test_a_point_moves_exactly_as_the_table_has_it(ledger: Ledger, old: PointState) -> None:
    ledger.put_run(max_in_flight=100)
    for step, new in enumerate(PointState):
        point = ledger.reach(old, step)
        values = {"reason": REASON_OF[new]} if new in REASON_OF else {}
        allowed = new in TRANSITIONS[old]
        with turn(ledger.db, ledger.moves.epoch) as now:
            with nullcontext() if allowed else pytest.raises(ValueError, match="no way"):
                now.move(point, new, **values)
        assert ledger.state(point) is (new if allowed else old)


@pytest.mark.parametrize("state", REASONS)
def test_an_end_takes_the_reasons_of_its_list_and_no_other(ledger: Ledger, state: PointState) -> None:
    wrong = ledger.live(S.RUNNING)
    for reason in set(Reason) - REASONS[state]:
        with pytest.raises(ValueError, match="no reason"):
            ledger.moves.end(wrong, state, reason, "why")
    assert ledger.state(wrong) is S.RUNNING
    assert ledger.point(wrong).history[0].ended_at is None
    for step, reason in enumerate(REASONS[state], start=2):
        point = ledger.live(S.RUNNING, step)
        assert ledger.moves.end(point, state, reason, "why")
        found = ledger.point(point)
        assert (found.state, found.reason, found.detail, found.ended_at) == (state, reason, "why", ledger.clock.now)
        assert found.history[0].outcome == reason


def test_a_result_is_written_once_with_all_its_times(ledger: Ledger) -> None:
    point = ledger.queued(3, stall_s=0.5, export_s=0.2, canary_s=0.1)
    ledger.clock.turn(10)
    ledger.go(point, S.SCORING)
    ledger.clock.turn(5)
    assert ledger.moves.finish(point, result(score=0.75, stderr=0.05, engines=("e1", "e2")))
    found = ledger.point(point)
    assert (found.state, found.score, found.stderr, found.pin_proof) == (S.DONE, 0.75, 0.05, PinProof.CANARY)
    assert found.metrics == {"exact": Metric(value=0.5, stderr=0.1, n=4)}
    assert found.timings.model_dump(exclude_none=True) == {
        "stall_s": 0.5,
        "export_s": 0.2,
        "canary_s": 0.1,
        "pin_s": 1.0,
        "queue_s": 10.0,
        "duration_s": 15.0,
    }
    assert [(a.number, a.outcome, a.engines) for a in found.history] == [(1, "done", ("e1", "e2"))]
    assert not ledger.moves.finish(point, result(score=0.1, samples_path="/another"))
    assert ledger.point(point).score == 0.75


@pytest.mark.parametrize("state", [S.PINNING, S.RUNNING])
def test_only_a_point_that_is_being_scored_gets_a_result(ledger: Ledger, state: PointState) -> None:
    point = ledger.live(state)
    assert not ledger.moves.finish(point, result())
    assert ledger.state(point) is state


@pytest.mark.parametrize("state", sorted(ENDS))
def test_an_end_stands_whoever_comes_later(ledger: Ledger, state: PointState) -> None:
    point = ledger.reach(state)
    before = ledger.point(point)
    assert not ledger.moves.end(point, S.FAILED, Reason.DEADLINE, "late")
    assert not ledger.moves.advance(point, S.RUNNING)
    assert not ledger.moves.finish(point, result(score=1.0, samples_path="/another"))
    assert ledger.moves.requeue(point, "engine", "late") is state
    assert ledger.moves.begin_attempt(point) is None
    ledger.moves.end_unserved(point, "late")
    assert ledger.point(point) == before


@pytest.mark.parametrize("state", sorted(LIVE))
def test_an_infrastructure_fault_is_another_attempt_until_there_were_enough(ledger: Ledger, state: PointState) -> None:
    point = ledger.queued(1)
    for number in range(1, MAX_ATTEMPTS):
        ledger.go(point, state)
        assert ledger.moves.requeue(point, "engine", "it died", ["e1"]) is S.QUEUED
        found = ledger.point(point)
        assert (found.attempts, found.reason, found.detail) == (number, None, "engine: it died")
    ledger.go(point, state)
    assert ledger.moves.requeue(point, "engine", "it died") is S.FAILED
    found = ledger.point(point)
    assert (found.state, found.reason, found.attempts) == (S.FAILED, Reason.MAX_ATTEMPTS, MAX_ATTEMPTS)
    assert [a.outcome for a in found.history] == ["engine"] * MAX_ATTEMPTS
    assert found.history[0].engines == ("e1",)


def test_what_an_attempt_was_spoiled_by_is_gone_once_the_point_is_done(ledger: Ledger) -> None:
    point = ledger.live(S.RUNNING)
    ledger.moves.requeue(point, "engine", "it died")
    ledger.go(point, S.DONE)
    assert ledger.point(point).detail is None


@pytest.mark.parametrize("state", sorted(LIVE))
def test_a_new_controller_queues_again_what_the_old_one_held_and_blames_no_point(
    ledger: Ledger, state: PointState
) -> None:
    point = ledger.live(state)
    for number in range(1, 2 * MAX_ATTEMPTS):
        assert ledger.take_over().recover() == 1
        found = ledger.point(point)
        assert (found.state, found.attempts) == (S.QUEUED, number)
        assert found.history[-1].outcome == "controller_lost"
        assert found.history[-1].ended_at is not None
        ledger.go(point, state)
    assert ledger.take_over().recover() == 1
    assert ledger.moves.recover() == 0


def test_recovery_leaves_alone_what_nobody_held(ledger: Ledger) -> None:
    kept = [ledger.reach(state, step) for step, state in enumerate(sorted(set(S) - LIVE))]
    before = [ledger.point(point) for point in kept]
    assert ledger.take_over().recover() == 0
    assert [ledger.point(point) for point in kept] == before


def test_lag_is_the_trainers_step_when_the_point_ended(ledger: Ledger) -> None:
    done, skipped, unknown = ledger.queued(10), ledger.queued(11), ledger.queued(12)
    ledger.intents.progress("r1", 17)
    ledger.go(done, S.DONE)
    ledger.moves.end(skipped, S.SKIPPED, Reason.UNHEALTHY, "")
    ledger.intents.progress("r1", 40)
    assert [ledger.point(point).lag_steps for point in (done, skipped, unknown)] == [7, 6, None]


def test_a_dispatch_tells_the_trainers_step_but_neither_a_manual_nor_a_deferred_one(ledger: Ledger) -> None:
    ledger.reserve(0, kind="baseline")
    assert ledger.views.run("r1").step == 0
    ledger.reserve(8, force=True)
    ledger.reserve(90, kind="manual", force=True)
    ledger.reserve(91, deferred=True)
    ledger.reserve(4, force=True)
    assert ledger.views.run("r1").step == 8


def test_overdue_is_what_took_too_long_since_it_was_queued(ledger: Ledger) -> None:
    early, tried = ledger.queued(1), ledger.live(S.RUNNING, 2)
    ledger.reserve(3, force=True)
    ledger.clock.turn(61)
    ledger.queued(4)
    ledger.done(5)
    assert sorted(ledger.moves.overdue(60)) == sorted([early, tried])
    assert ledger.moves.overdue(62) == []


def test_a_queued_point_whose_time_is_up_was_unserved_or_has_failed(ledger: Ledger) -> None:
    untried, tried, running = ledger.queued(1), ledger.live(S.PINNING, 2), ledger.live(S.RUNNING, 3)
    ledger.moves.requeue(tried, "engine", "it died")
    for point in (untried, tried, running):
        ledger.moves.end_unserved(point, "60 s")
    ended = [(ledger.point(p).state, ledger.point(p).reason) for p in (untried, tried, running)]
    assert ended == [(S.SKIPPED, Reason.UNHEALTHY), (S.FAILED, Reason.DEADLINE), (S.RUNNING, None)]


def test_a_snapshot_settles_with_the_last_of_its_points_and_no_sooner(ledger: Ledger) -> None:
    first, second = (ref.id for ref in ledger.send(5, suites=("main", "extra")).points)
    ledger.look()
    ledger.admit()
    ledger.go(first, S.DONE)
    assert ledger.snapshot(5)["settled_at"] is None
    ledger.clock.turn(3)
    ledger.moves.end(second, S.SKIPPED, Reason.UNHEALTHY, "")
    assert ledger.snapshot(5)["settled_at"] == ledger.clock.now


def test_a_snapshot_that_is_dispatched_again_is_unsettled_until_that_point_ends(ledger: Ledger) -> None:
    ledger.done(5)
    again = ledger.queued(5, suites=("extra",))
    assert ledger.snapshot(5)["settled_at"] is None
    ledger.go(again, S.DONE)
    assert ledger.snapshot(5)["settled_at"] is not None


def test_a_lane_is_overtaken_when_its_point_ended_or_is_queued_anew(ledger: Ledger) -> None:
    running, cancelled, queued = (ledger.live(S.RUNNING, step) for step in (1, 2, 3))
    ledger.orders.cancel(cancelled)
    ledger.look()
    ledger.moves.requeue(queued, "engine", "it died")
    lanes = [running, cancelled, queued]
    assert sorted(ledger.moves.overtaken(lanes)) == sorted([cancelled, queued])
    assert not ledger.moves.advance(queued, S.SCORING)


def test_what_runs_is_in_the_order_it_was_asked_for_and_admitted(ledger: Ledger) -> None:
    ledger.put_run("r2", priority=7, max_engines=3)
    ledger.queued(9)
    own = ledger.queued(2, run="r2", priority=1, force=True)
    theirs = ledger.queued(3, run="r2")
    ledger.send(4)
    ledger.look()
    found = ledger.moves.runnable()
    assert [(p.run, p.step) for p in found] == [("r1", 9), ("r2", 2), ("r2", 3)]
    assert [p.max_engines for p in found] == [None, 3, 3]
    assert {p.id: p.priority for p in found[1:]} == {own: 1, theirs: 7}
    assert found[1].snapshot == str(ledger.path(2, run="r2"))
    assert found[1].digest == "a" * 32
    assert ledger.moves.manifest(found[1].snapshot_id).digest == "a" * 32


def test_a_runs_priority_is_that_of_its_queued_points_also_when_it_changes(ledger: Ledger) -> None:
    point = ledger.queued(1)
    ledger.put_run(priority=9)
    assert ledger.moves.runnable()[0].priority == 9
    assert ledger.point(point).priority == 9
