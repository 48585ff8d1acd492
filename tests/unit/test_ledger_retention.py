"""What GC reads of the ledger: who needs a snapshot, which are ours, and the claim before a directory is touched."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from eval_service.contract.states import LIVE, PointState, Reason
from eval_service.contract.wire import DispatchRequest
from eval_service.gc.plan import plan_deletions
from eval_service.ledger.bounds import Bounds
from eval_service.ledger.intents import Intents
from tests.support.ledger import EXPIRY_S, SUITES, Ledger

S = PointState


@pytest.fixture
def ledger(tmp_path: Path, database_url: str) -> Ledger:
    ledger = Ledger(tmp_path, database_url)
    ledger.put_run(max_in_flight=50)
    return ledger


def spare(ledger: Ledger, keep: int = 0) -> list[int]:
    return [deletion.step for deletion in plan_deletions(ledger.retention.on_storage(), {"r1": keep})]


def done(ledger: Ledger, step: int, score: float = 0.5, **changes: object) -> str:
    """Points that settle a second apart."""
    ledger.clock.turn(1)
    return ledger.done(step, score=score, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("state", sorted({S.QUEUED} | LIVE))
def test_a_snapshot_with_an_open_point_is_needed(ledger: Ledger, state: PointState) -> None:
    ledger.reach(state)
    (row,) = ledger.retention.on_storage()
    assert (row.queued, row.leased) == (state is S.QUEUED, state in LIVE)
    assert not ledger.retention.claim(row.id)
    assert spare(ledger) == []


def test_a_snapshot_that_arrived_and_is_not_queued_yet_is_needed(ledger: Ledger) -> None:
    ledger.send(1)
    assert ledger.retention.on_storage()[0].queued
    assert not ledger.retention.claim(ledger.snapshot(1)["id"])


def test_a_snapshot_that_came_late_is_needed_before_anybody_looked(ledger: Ledger) -> None:
    done(ledger, 1)
    reply = ledger.reserve(1, suites=("extra",))
    ledger.clock.turn(EXPIRY_S + 1)
    ledger.look()
    ledger.send(1, reservation=reply.reservation)
    assert not ledger.retention.claim(ledger.snapshot(1)["id"])


def test_the_best_of_each_suite_so_far_stays_and_the_newest_of_equals(ledger: Ledger) -> None:
    for step, score in ((1, 0.2), (2, 0.9), (3, 0.9), (4, 0.3)):
        done(ledger, step, score)
    done(ledger, 1, 0.8, suites=("extra",))
    done(ledger, 4, 0.1, suites=("extra",))
    assert spare(ledger) == [2, 4]
    assert spare(ledger, keep=1) == [2]


def test_a_superseded_score_is_nobodys_best(ledger: Ledger) -> None:
    done(ledger, 1, 0.9)
    done(ledger, 1, 0.1, digest="b" * 32)
    assert {row.digest[0]: row.best for row in ledger.retention.on_storage()} == {"a": False, "b": True}


def test_a_refused_export_of_ours_can_be_deleted(ledger: Ledger) -> None:
    ledger.send(1)
    ledger.look()
    ledger.moves.refuse(ledger.moves.unadmitted()[0].id, Reason.SNAPSHOT_INVALID, "NaN", ledger.manifest(1))
    assert spare(ledger) == [1]


def test_an_export_whose_manifest_nobody_could_read_is_left_alone(ledger: Ledger) -> None:
    ledger.send(1)
    ledger.look()
    ledger.moves.refuse(ledger.moves.unadmitted()[0].id, Reason.CKPT_MISSING, "no marker")
    assert spare(ledger) == []


def test_an_export_that_ended_before_its_checks_is_described_later_and_deleted(ledger: Ledger) -> None:
    (ref,) = ledger.send(1).points
    ledger.orders.cancel(ref.id)
    ledger.look()
    (found,) = ledger.retention.undescribed()
    assert (found.run, found.step, found.path, found.digest) == ("r1", 1, str(ledger.path(1)), "a" * 32)
    assert not ledger.retention.describe(found, ledger.manifest(1, "b" * 32))
    assert not ledger.retention.describe(found, ledger.manifest(2))
    assert spare(ledger) == []
    assert ledger.retention.describe(found, ledger.manifest(1))
    assert ledger.retention.undescribed() == []
    assert spare(ledger) == [1]


def test_only_our_own_settled_exports_are_described(ledger: Ledger) -> None:
    ledger.send(1)
    for step, source in ((2, "caller"), (3, "reuse")):
        ledger.orders.cancel(ledger.send(step, source=source).points[0].id)
    ledger.look()
    assert ledger.retention.undescribed() == []


@pytest.mark.parametrize("source", ["caller", "reuse"])
def test_what_is_not_our_export_is_never_planned(ledger: Ledger, source: str) -> None:
    done(ledger, 1, source=source)
    assert spare(ledger) == []


def test_a_deleted_snapshot_is_gone_from_the_plan_and_the_count(ledger: Ledger) -> None:
    done(ledger, 1, 0.1)
    done(ledger, 2, 0.9)
    assert ledger.views.run("r1").snapshots_kept == 2
    snapshot = ledger.snapshot(1)["id"]
    assert ledger.retention.claim(snapshot)
    assert ledger.retention.claim(snapshot), "a deletion that was cut short is taken up again"
    assert spare(ledger) == [1]
    ledger.retention.deleted(snapshot)
    assert [row.step for row in ledger.retention.on_storage()] == [2]
    assert ledger.views.run("r1").snapshots_kept == 1


def test_nothing_is_deleted_that_was_not_claimed(ledger: Ledger) -> None:
    done(ledger, 1)
    ledger.retention.deleted(ledger.snapshot(1)["id"])
    assert ledger.snapshot(1)["deleted_at"] is None


@pytest.mark.parametrize("gone", [False, True])
def test_a_path_that_is_exported_anew_is_checked_as_a_new_snapshot(ledger: Ledger, gone: bool) -> None:
    """The old nonce and digest are no longer what lies there, whether or not the deletion has come to its end."""
    done(ledger, 1)
    snapshot = ledger.snapshot(1)["id"]
    ledger.retention.claim(snapshot)
    if gone:
        ledger.retention.deleted(snapshot)
    ledger.send(1)
    ledger.look()
    assert [item.id for item in ledger.moves.unadmitted()] == [snapshot]
    assert ledger.moves.runnable() == []
    ledger.retention.deleted(snapshot)
    row = ledger.snapshot(1)
    assert (row["nonce"], row["deleting_at"], row["deleted_at"]) == (None, None, None)


def test_places_tell_each_runs_root_and_keep_and_zero_for_one_that_is_deleted(ledger: Ledger) -> None:
    ledger.put_run("r2", keep=5)
    ledger.orders.delete_run("r1")
    assert [(p.run, p.root, p.keep, p.deleting) for p in ledger.retention.places()] == [
        ("r1", ledger.root, 0, True),
        ("r2", ledger.root, 5, False),
    ]


def test_a_deleted_run_keeps_not_even_its_best(ledger: Ledger) -> None:
    done(ledger, 1)
    ledger.orders.delete_run("r1")
    assert spare(ledger) == [1]


def test_runs_with_a_live_reservation_may_be_exporting(ledger: Ledger) -> None:
    ledger.put_run("r2")
    ledger.reserve(1)
    ledger.done(1, run="r2")
    assert ledger.retention.reserved_runs() == {"r1"}


def test_the_scan_is_told_what_the_ledger_lacks(ledger: Ledger) -> None:
    def has(reservation: str) -> bool:
        return ledger.retention.has(DispatchRequest(run="r1", step=1, reservation=reservation))

    assert not has(str(uuid.uuid4()))
    reserved = ledger.reserve(1).reservation
    assert not has(reserved), "its snapshot may lie there already"
    ledger.send(1, reservation=reserved)
    assert has(reserved)
    cancelled = ledger.reserve(2)
    ledger.orders.cancel(cancelled.points[0].id)
    ledger.look()
    assert not has(cancelled.reservation), "its directory, once published, has to be known to be deleted"
    ledger.send(2, reservation=cancelled.reservation)
    assert has(cancelled.reservation)


def test_a_snapshot_in_an_object_store_needs_no_directory_of_the_same_name(ledger: Ledger) -> None:
    ledger.intents = Intents(ledger.db, Bounds((ledger.root,), SUITES, objects=("s3://bucket/evals",)))
    url = f"s3://bucket/evals/r1/{ledger.path(1).name}"
    ledger.send(1, snapshot=url)
    assert ledger.retention.needed("r1") == {}
    ledger.send(2)
    assert ledger.retention.needed("r1") == {ledger.path(2).name: True}


def test_what_is_claimed_is_spare_until_its_step_is_exported_or_dispatched_again(ledger: Ledger) -> None:
    for step in (1, 2):
        done(ledger, step)
        snapshot = ledger.snapshot(step)["id"]
        assert not ledger.retention.spare(snapshot), "nobody has claimed it"
        assert ledger.retention.claim(snapshot)
        assert ledger.retention.spare(snapshot)
        ledger.reserve(step) if step == 1 else ledger.send(step)
        assert not ledger.retention.spare(snapshot)
        assert not ledger.retention.deleted(snapshot)
