"""Reservations, arrivals and overflow: the same uuid is the same points; the bound holds before an export is paid."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from eval_service.contract.errors import Busy, Conflict, InvalidRequest, NotFound
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import DispatchRequest, Granted, Overflow
from eval_service.ledger.moves import Facts
from tests.support.ledger import EXPIRY_S, Ledger

S = PointState


@pytest.fixture
def ledger(tmp_path: Path, database_url: str) -> Ledger:
    return Ledger(tmp_path, database_url)


def new_uuid() -> str:
    return str(uuid.uuid4())


# --- the same uuid is the same points


def test_a_reservation_is_a_point_a_suite(ledger: Ledger) -> None:
    ledger.put_run(suites=("main", "extra"))
    reply = ledger.reserve(5)
    assert reply.outcome is Granted.GRANTED
    assert [(ref.suite, ref.state) for ref in reply.points] == [("main", S.RESERVED), ("extra", S.RESERVED)]
    assert [ref.suite for ref in ledger.reserve(6, suites=("extra", "extra")).points] == ["extra"]


def test_a_reservation_repeated_after_a_lost_answer_is_the_same_points(ledger: Ledger) -> None:
    reservation = new_uuid()
    first = ledger.reserve(5, reservation=reservation)
    for _ in range(3):
        again = ledger.reserve(5, reservation=reservation)
        assert (again.outcome, again.points) == (Granted.KNOWN, first.points)
    assert len(ledger.states()) == 1


def test_a_snapshot_sent_again_after_a_lost_answer_changes_nothing(ledger: Ledger) -> None:
    reservation = ledger.reserve(5).reservation
    assert ledger.send(5, reservation=reservation).outcome is Granted.TAKEN
    assert ledger.send(5, reservation=reservation).outcome is Granted.KNOWN
    ledger.look()
    assert ledger.send(5, reservation=reservation).outcome is Granted.KNOWN
    assert ledger.states() == [(5, "main", S.QUEUED)]


def test_a_reservation_keeps_its_suites_when_the_runs_change(ledger: Ledger) -> None:
    reservation = ledger.reserve(5).reservation
    ledger.put_run(suites=("main", "extra"))
    assert [ref.suite for ref in ledger.send(5, reservation=reservation).points] == ["main"]


def test_what_the_export_cost_is_kept_also_when_the_scan_was_first(ledger: Ledger) -> None:
    reservation = new_uuid()
    (ref,) = ledger.send(5, reservation=reservation).points
    ledger.send(5, reservation=reservation, stall_s=0.5, export_s=2.0)
    assert ledger.point(ref.id).timings.model_dump(exclude_none=True) == {"stall_s": 0.5, "export_s": 2.0}


@pytest.mark.parametrize(
    ("change", "field"),
    [({"step": 6}, "reservation"), ({"run": "r2"}, "reservation"), ({"suites": ("main", "extra")}, "suites")],
)
def test_a_uuid_that_is_of_something_else_is_a_conflict(ledger: Ledger, change: dict[str, Any], field: str) -> None:
    ledger.put_run("r2")
    reservation = ledger.reserve(5).reservation
    values: dict[str, Any] = {"step": 5, "reservation": reservation, **change}
    with pytest.raises(Conflict) as caught:
        ledger.reserve(**values)
    assert caught.value.field == field
    assert ledger.states() == [(5, "main", S.RESERVED)]


def test_a_uuid_with_another_path_is_a_conflict_and_the_first_path_stands(ledger: Ledger) -> None:
    reservation = ledger.send(5).reservation
    with pytest.raises(Conflict) as caught:
        ledger.send(5, "b" * 32, reservation=reservation)
    assert caught.value.field == "snapshot"
    assert ledger.snapshot(5)["path"] == str(ledger.path(5))


def test_a_path_is_known_as_it_is_written_and_a_repeated_slash_is_no_other_path(ledger: Ledger) -> None:
    reservation = ledger.send(5, snapshot=f"{ledger.root}//r1/./step/").reservation
    assert ledger.send(5, snapshot=f"{ledger.root}/r1/step", reservation=reservation).outcome is Granted.KNOWN


def test_a_dispatch_asks_the_file_system_nothing(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared mount that hangs would hang the request."""
    path = str(ledger.path(5))

    def hangs(*_: object, **__: object) -> None:
        raise AssertionError("the file system was asked")

    for name in ("stat", "lstat", "readlink", "open", "listdir", "scandir"):
        monkeypatch.setattr(f"os.{name}", hangs)
    assert ledger.send(5, snapshot=path).outcome is Granted.TAKEN


def test_a_root_named_through_a_link_is_inside_once_its_links_are_followed(ledger: Ledger) -> None:
    link = ledger.base / "data"
    link.symlink_to(ledger.root)
    ledger.send(5, snapshot=str(link / "r1" / "step"))
    assert ledger.snapshot(5)["path"] == str(ledger.root / "r1" / "step")


@pytest.mark.parametrize(
    ("change", "error", "field"),
    [
        ({"run": "unheard"}, NotFound, "run"),
        ({"suites": ("unheard",)}, InvalidRequest, "suites"),
        ({"suites": ()}, InvalidRequest, "suites"),
        ({"snapshot": "relative/path"}, InvalidRequest, "snapshot"),
        ({"snapshot": "/etc"}, InvalidRequest, "snapshot"),
        ({"snapshot": "/x\0y"}, InvalidRequest, "snapshot"),
    ],
)
def test_a_bad_dispatch_names_the_field_and_leaves_no_point(
    ledger: Ledger, change: dict[str, Any], error: type[Exception], field: str
) -> None:
    with pytest.raises(error) as caught:
        ledger.reserve(5, **change)
    assert getattr(caught.value, "field", None) == field
    assert ledger.states() == []


@pytest.mark.parametrize("path", ["{root}/..", "{root}/link/../../..", "{root}-beside", "/etc/../{root}/../etc"])
def test_a_path_that_leads_out_of_the_roots_is_refused_however_it_is_written(ledger: Ledger, path: str) -> None:
    (ledger.root / "link").symlink_to(ledger.path(1))
    with pytest.raises(InvalidRequest, match="outside the service's roots"):
        ledger.send(5, snapshot=path.replace("{root}", str(ledger.root)))


# --- overflow


def test_backpressure_waits_for_room_and_gets_it_when_a_snapshot_settles(ledger: Ledger) -> None:
    reservation = new_uuid()
    first = ledger.queued(1)
    ledger.queued(2)
    for wait_s in (None, 5.0):
        with pytest.raises(Busy):
            ledger.reserve(3, reservation=reservation, wait_s=wait_s)
    ledger.go(first, S.DONE)
    assert ledger.reserve(3, reservation=reservation, wait_s=5.0).outcome is Granted.GRANTED


def test_backpressure_that_was_waited_out_skips_a_periodic_point_for_good(ledger: Ledger) -> None:
    ledger.queued(1)
    ledger.queued(2)
    reply = ledger.reserve(3)
    assert reply.outcome is Granted.SKIPPED
    assert [(ref.state, ref.reason) for ref in reply.points] == [(S.SKIPPED, Reason.BUSY)]
    assert ledger.reserve(3, reservation=reply.reservation).outcome is Granted.SKIPPED
    assert ledger.point(reply.points[0].id).ended_at == ledger.clock.now


def test_a_forced_point_waits_like_any_other_and_then_comes_in_over_the_bound(ledger: Ledger) -> None:
    ledger.queued(1)
    ledger.queued(2)
    with pytest.raises(Busy):
        ledger.reserve(3, force=True, wait_s=5.0)
    assert ledger.reserve(3, force=True).outcome is Granted.GRANTED


def test_skip_skips_at_once_what_is_not_forced(ledger: Ledger) -> None:
    ledger.put_run(overflow=Overflow.SKIP)
    ledger.queued(1)
    ledger.queued(2)
    assert ledger.reserve(3, wait_s=5.0).outcome is Granted.SKIPPED
    assert ledger.reserve(3, wait_s=5.0, force=True).outcome is Granted.GRANTED


def test_latest_takes_the_place_of_the_oldest_that_waits(ledger: Ledger) -> None:
    ledger.put_run(overflow=Overflow.LATEST, max_in_flight=3)
    running, oldest, newer = ledger.live(S.RUNNING, 1), ledger.queued(2), ledger.queued(3)
    assert ledger.reserve(4, wait_s=5.0).outcome is Granted.GRANTED
    ledger.look()
    assert [ledger.state(point) for point in (running, oldest, newer)] == [S.RUNNING, S.SKIPPED, S.QUEUED]
    found = ledger.point(oldest)
    assert (found.reason, found.detail) == (Reason.BUSY, "gave way to a later point")


def test_latest_never_drops_a_forced_point_and_skips_when_nothing_may_give_way(ledger: Ledger) -> None:
    ledger.put_run(overflow=Overflow.LATEST)
    forced, running = ledger.queued(1, force=True), ledger.live(S.PINNING, 2)
    assert ledger.reserve(3, wait_s=5.0).outcome is Granted.SKIPPED
    ledger.look()
    assert [ledger.state(point) for point in (forced, running)] == [S.QUEUED, S.PINNING]


def test_two_latecomers_take_the_places_of_two(ledger: Ledger) -> None:
    ledger.put_run(overflow=Overflow.LATEST)
    points = [ledger.queued(1), ledger.queued(2)]
    assert [ledger.reserve(step).outcome for step in (3, 4)] == [Granted.GRANTED] * 2
    ledger.look()
    assert [ledger.state(point) for point in points] == [S.SKIPPED] * 2


def test_all_suites_of_a_snapshot_give_way_together_or_none(ledger: Ledger) -> None:
    """Half of one would hold its place in the bound as well as the whole."""
    ledger.put_run(overflow=Overflow.LATEST, suites=("main", "extra"))
    ledger.send(1)
    ledger.send(2)
    ledger.look()
    ledger.admit()
    half_run = ledger.views.points(run="r1", step=1).points[0]
    ledger.go(half_run.id, S.RUNNING)
    assert ledger.reserve(3).outcome is Granted.GRANTED
    ledger.look()
    assert ledger.states()[:4] == [
        *((1, "main", S.RUNNING), (1, "extra", S.QUEUED)),
        *((2, "main", S.SKIPPED), (2, "extra", S.SKIPPED)),
    ]


def test_one_that_began_before_it_could_give_way_goes_on(ledger: Ledger) -> None:
    ledger.put_run(overflow=Overflow.LATEST, max_in_flight=1)
    point = ledger.queued(1)
    ledger.reserve(2)
    ledger.moves.begin_attempt(point)
    ledger.look()
    assert ledger.state(point) is S.PINNING


def test_the_bound_counts_snapshots_and_not_suites(ledger: Ledger) -> None:
    ledger.put_run(suites=("main", "extra"), max_in_flight=2)
    ledger.send(1)
    assert ledger.send(1, suites=("third",), deferred=False).outcome is Granted.TAKEN
    assert ledger.reserve(2).outcome is Granted.GRANTED
    assert ledger.reserve(3).outcome is Granted.SKIPPED


def test_a_further_suite_on_a_snapshot_in_flight_needs_no_room(ledger: Ledger) -> None:
    ledger.put_run(max_in_flight=1)
    ledger.send(1)
    assert ledger.send(1, suites=("extra",), deferred=False).outcome is Granted.TAKEN
    assert ledger.send(2, deferred=False).outcome is Granted.SKIPPED


def test_the_bound_is_each_runs_own(ledger: Ledger) -> None:
    ledger.put_run("r2", max_in_flight=1)
    ledger.queued(1)
    ledger.queued(2)
    assert ledger.reserve(1, run="r2").outcome is Granted.GRANTED
    assert ledger.reserve(2, run="r2").outcome is Granted.SKIPPED


def test_what_was_exported_while_the_service_was_away_comes_in_over_the_bound(ledger: Ledger) -> None:
    ledger.put_run(max_in_flight=1)
    assert [ledger.send(step, deferred=True).outcome for step in (1, 2, 3)] == [Granted.TAKEN] * 3


def test_what_was_exported_since_the_refusal_was_never_heard_comes_in_over_the_bound_too(ledger: Ledger) -> None:
    ledger.put_run(max_in_flight=1, overflow="skip")
    ledger.reserve(1)
    refused = ledger.reserve(2)
    assert refused.outcome is Granted.SKIPPED
    assert ledger.send(2, reservation=refused.reservation, deferred=True).outcome is Granted.TAKEN
    ledger.send(2, reservation=refused.reservation, deferred=True)  # the answer was lost
    assert ledger.look() == 1
    found = ledger.point(refused.points[0].id)
    assert (found.state, found.reason) == (S.QUEUED, None)


# --- expiry, failed exports, and what comes late


def test_a_reservation_nobody_uses_expires_and_frees_its_place(ledger: Ledger) -> None:
    ledger.put_run(max_in_flight=1)
    (ref,) = ledger.reserve(1).points
    ledger.clock.turn(EXPIRY_S)
    assert ledger.look() == 0
    ledger.clock.turn(1)
    ledger.look()
    assert ledger.point(ref.id).reason is Reason.RESERVATION_EXPIRED
    assert ledger.reserve(2).outcome is Granted.GRANTED


def test_a_snapshot_that_comes_after_its_reservation_expired_is_evaluated_all_the_same(ledger: Ledger) -> None:
    reply = ledger.reserve(1)
    ledger.clock.turn(EXPIRY_S + 1)
    ledger.look()
    assert ledger.send(1, reservation=reply.reservation).outcome is Granted.TAKEN
    ledger.look()
    found = ledger.point(reply.points[0].id)
    assert (found.state, found.reason, found.detail, found.ended_at) == (S.QUEUED, None, None, None)


def test_a_late_snapshot_whose_content_is_on_its_way_already_is_superseded(ledger: Ledger) -> None:
    running = ledger.live(S.RUNNING, 1)
    reply = ledger.reserve(1, force=True)
    ledger.clock.turn(EXPIRY_S + 1)
    ledger.look()
    ledger.send(1, reservation=reply.reservation)
    ledger.look()
    found = ledger.point(reply.points[0].id)
    assert (found.state, found.reason, found.superseded) == (S.CANCELLED, Reason.SUPERSEDED, True)
    assert ledger.state(running) is S.RUNNING


def test_a_snapshot_that_arrived_does_not_expire_while_nobody_looks(ledger: Ledger) -> None:
    (ref,) = ledger.send(1).points
    ledger.clock.turn(EXPIRY_S + 1)
    ledger.look()
    assert ledger.state(ref.id) is S.QUEUED


def test_a_failed_export_ends_its_reserved_points_once_told(ledger: Ledger) -> None:
    (ref,) = ledger.reserve(1).points
    for _ in range(2):
        ledger.orders.report_export_failed(ref.id, "disk full")
        ledger.look()
    found = ledger.point(ref.id)
    assert (found.state, found.reason, found.detail) == (S.SKIPPED, Reason.EXPORT_FAILED, "disk full")


@pytest.mark.parametrize("state", [S.QUEUED, S.RUNNING, S.DONE, S.FAILED, S.CANCELLED])
def test_only_a_reserved_point_can_have_a_failed_export(ledger: Ledger, state: PointState) -> None:
    point = ledger.reach(state)
    with pytest.raises(Conflict, match="reserved"):
        ledger.orders.report_export_failed(point, "disk full")


def test_a_snapshot_that_arrived_first_wins_over_the_report(ledger: Ledger) -> None:
    reply = ledger.reserve(1)
    ledger.orders.report_export_failed(reply.points[0].id, "disk full")
    ledger.send(1, reservation=reply.reservation)
    ledger.look()
    assert ledger.state(reply.points[0].id) is S.QUEUED
    (ref,) = ledger.send(2).points
    with pytest.raises(Conflict, match="its snapshot came"):
        ledger.orders.report_export_failed(ref.id, "disk full")


def test_a_snapshot_for_a_point_that_was_taken_back_is_known_but_not_evaluated(ledger: Ledger) -> None:
    """Its directory is there: GC has to know of it, and a retry may use it."""
    reply = ledger.reserve(1)
    ledger.orders.cancel(reply.points[0].id)
    ledger.look()
    sent = ledger.send(1, reservation=reply.reservation)
    assert sent.outcome is Granted.SKIPPED
    ledger.look()
    found = ledger.point(reply.points[0].id)
    assert (found.state, found.snapshot) == (S.CANCELLED, str(ledger.path(1)))
    assert ledger.snapshot(1)["settled_at"] is not None


# --- another digest


def test_another_digest_of_the_step_supersedes_what_was_there(ledger: Ledger) -> None:
    for step, state in enumerate((S.QUEUED, S.RUNNING, S.DONE, S.FAILED), start=1):
        older = ledger.reach(state, step)
        newer = ledger.queued(step, "b" * 32)
        found = ledger.point(older)
        assert found.superseded
        if state in (S.DONE, S.FAILED):
            assert found.state is state
        else:
            assert (found.state, found.reason, found.detail) == (S.CANCELLED, Reason.SUPERSEDED, f"by point {newer}")
        assert ledger.state(newer) is S.QUEUED
        assert not ledger.point(newer).superseded


def test_an_older_point_goes_on_until_the_newer_snapshot_is_found_to_be_sound(ledger: Ledger) -> None:
    older = ledger.live(S.RUNNING, 1)
    (newer,) = ledger.send(1, "b" * 32).points
    ledger.look()
    assert ledger.state(older) is S.RUNNING
    ledger.moves.refuse(ledger.moves.unadmitted()[0].id, Reason.SNAPSHOT_INVALID, "NaN")
    assert ledger.state(older) is S.RUNNING
    assert ledger.state(newer.id) is S.SKIPPED


def test_the_same_digest_that_is_still_on_its_way_is_evaluated_once(ledger: Ledger) -> None:
    older = ledger.live(S.RUNNING, 1)
    newer = ledger.queued(1)
    found = ledger.point(newer)
    assert (found.state, found.reason, found.superseded) == (S.CANCELLED, Reason.SUPERSEDED, True)
    assert found.detail == f"the same snapshot is point {older}"
    assert ledger.state(older) is S.RUNNING
    assert not ledger.point(older).superseded


def test_what_was_reserved_first_and_comes_after_the_same_snapshot_did_is_evaluated_once(ledger: Ledger) -> None:
    """A trainer is back from its death and has reserved the step anew as the scan takes in what it had published."""
    reply = ledger.reserve(1)
    newer = ledger.queued(1, force=True)
    ledger.send(1, reservation=reply.reservation)
    ledger.look()
    found = ledger.point(reply.points[0].id)
    assert (found.state, found.reason, found.superseded) == (S.CANCELLED, Reason.SUPERSEDED, True)
    assert found.detail == f"the same snapshot is point {newer}"
    assert ledger.state(newer) is S.QUEUED
    assert not ledger.point(newer).superseded


def test_the_same_digest_elsewhere_that_waits_for_its_checks_is_evaluated_once(ledger: Ledger) -> None:
    (older,) = ledger.send(1).points
    elsewhere = ledger.root / "elsewhere"
    elsewhere.mkdir()
    (newer,) = ledger.send(1, snapshot=str(elsewhere), source="caller").points
    ledger.look()
    waiting = {item.path: item for item in ledger.moves.unadmitted()}
    ledger.moves.admit(waiting[str(elsewhere)].id, Facts(ledger.manifest(1), 32))
    assert ledger.state(older.id) is S.QUEUED
    assert ledger.state(newer.id) is S.CANCELLED


def test_the_same_digest_of_a_point_that_has_ended_is_a_new_point_that_counts(ledger: Ledger) -> None:
    older = ledger.done(1)
    newer = ledger.queued(1)
    assert ledger.state(newer) is S.QUEUED
    assert ledger.point(older).superseded


def test_other_suites_steps_and_runs_are_not_superseded(ledger: Ledger) -> None:
    ledger.put_run("r2")
    others = [ledger.queued(1, suites=("extra",)), ledger.queued(2), ledger.queued(1, run="r2")]
    ledger.queued(1, "b" * 32)
    assert [ledger.state(point) for point in others] == [S.QUEUED] * 3


# --- admission


def test_a_refused_snapshot_ends_all_that_wait_for_it_and_keeps_what_gc_must_know(ledger: Ledger) -> None:
    ledger.send(1, suites=("main", "extra"))
    ledger.look()
    (waiting,) = ledger.moves.unadmitted()
    manifest = ledger.manifest(1)
    ledger.moves.refuse(waiting.id, Reason.SNAPSHOT_INVALID, "NaN in lm_head", manifest)
    assert {state for _, _, state in ledger.states()} == {S.SKIPPED}
    row = ledger.snapshot(1)
    assert (row["nonce"], row["digest"], row["admitted_at"]) == (manifest.nonce, manifest.digest, None)
    assert row["settled_at"] is not None


def test_a_snapshot_is_checked_once_for_all_its_suites_and_as_long_as_points_wait(ledger: Ledger) -> None:
    ledger.send(1, suites=("main", "extra"))
    assert ledger.moves.unadmitted() == []
    ledger.look()
    (waiting,) = ledger.moves.unadmitted()
    assert (waiting.step, waiting.claimed_digest, waiting.queued_at) == (1, "a" * 32, ledger.clock.now)
    for point in ledger.views.points(run="r1").points:
        ledger.orders.cancel(point.id)
    ledger.look()
    assert ledger.moves.unadmitted() == []


def test_our_own_export_is_checked_once_and_a_callers_directory_each_time_it_is_sent(ledger: Ledger) -> None:
    ledger.done(1)
    theirs = ledger.done(2, source="caller")
    assert ledger.state(theirs) is S.DONE
    ledger.send(1, suites=("extra",))
    ledger.send(2, suites=("extra",), source="caller")
    ledger.look()
    assert [item.step for item in ledger.moves.unadmitted()] == [2]


def test_a_reuse_of_a_path_with_another_digest_is_checked_again(ledger: Ledger) -> None:
    ledger.done(1, source="reuse")
    ledger.send(1, snapshot=str(ledger.path(1)), digest="b" * 32, source="reuse", suites=("extra",))
    ledger.look()
    assert [item.claimed_digest for item in ledger.moves.unadmitted()] == ["b" * 32]


def test_a_dispatch_that_names_a_huge_priority_is_refused_at_the_edge() -> None:
    values = {"run": "r1", "step": 1, "reservation": new_uuid(), "priority": 10**30}
    with pytest.raises(ValueError, match="priority"):
        DispatchRequest.model_validate(values)
