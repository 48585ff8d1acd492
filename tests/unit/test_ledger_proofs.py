"""What the ledger knows to have been proven, for a controller that has seen nothing itself yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from eval_service.contract.manifest import Manifest, TensorEntry
from eval_service.contract.states import PinProof, PointState, Reason
from eval_service.ledger.moves import Facts
from eval_service.ledger.proofs import MOST, Proofs
from eval_service.ledger.schema import points, snapshots
from tests.support.ledger import Ledger, result

IN_QUESTION = "f" * 32
S = PointState


@pytest.fixture
def ledger(tmp_path: Path, database_url: str) -> Ledger:
    ledger = Ledger(tmp_path, database_url)
    ledger.put_run(max_in_flight=50)
    return ledger


def digest_of(step: int) -> str:
    return f"{step:032x}"[::-1]


def proven(ledger: Ledger, step: int, digest: str | None = None, **changes: Any) -> str:
    """A point that a lane brought to its end, a second after the one before."""
    ledger.clock.turn(1)
    digest = digest or digest_of(step)
    point = ledger.queued(step, digest)
    ledger.go(point, S.SCORING)
    finish(ledger, point, digest, **changes)
    return point


def finish(ledger: Ledger, point: str, digest: str, **changes: Any) -> None:
    assert ledger.moves.finish(point, result(**({"weight_version": f"{digest[:8]}.{point}.1"} | changes)))


def steps(ledger: Ledger) -> list[int]:
    """What a successor would take for good ones, where another snapshot is in question."""
    ledger.take_over()
    others = Proofs(ledger.db).others(ledger.manifest(99, IN_QUESTION))
    assert all(one.path == str(ledger.path(one.manifest.step, one.manifest.digest)) for one in others)
    return [one.manifest.step for one in others]


def test_what_was_proven_last_comes_first_and_a_few_of_them_are_enough(ledger: Ledger) -> None:
    for step in (5, 6, 1, 3, 2, 4):
        proven(ledger, step)
    assert steps(ledger) == [4, 2, 3, 1][:MOST]


def test_what_counts_is_when_it_was_proven_and_not_when_it_was_asked_for(ledger: Ledger) -> None:
    first = ledger.queued(1, digest_of(1))
    ledger.go(first, S.SCORING)
    proven(ledger, 2)
    ledger.clock.turn(1)
    finish(ledger, first, digest_of(1))
    assert steps(ledger) == [1, 2]


def test_a_snapshot_is_never_its_own_good_one_but_is_known_to_be_proven(ledger: Ledger) -> None:
    proven(ledger, 1)
    proven(ledger, 2)
    of_it = ledger.manifest(2, digest_of(2))
    assert [one.manifest.step for one in Proofs(ledger.db).others(of_it)] == [1]
    assert Proofs(ledger.db).has(of_it.digest)
    assert not Proofs(ledger.db).has(IN_QUESTION)


@pytest.mark.parametrize("state", [state for state in S if state is not S.DONE])
def test_a_point_that_is_not_done_proves_nothing(ledger: Ledger, state: PointState) -> None:
    ledger.reach(state)
    assert steps(ledger) == []
    assert not Proofs(ledger.db).has("a" * 32)


@pytest.mark.parametrize("reason", [Reason.MAX_ATTEMPTS, Reason.PIN_VIOLATION])
def test_a_point_that_was_done_and_then_tried_again_in_vain_proves_nothing(ledger: Ledger, reason: Reason) -> None:
    """What its former attempt left in its row is no word on how it ended."""
    point = proven(ledger, 1)
    state = S.FAILED if reason is Reason.MAX_ATTEMPTS else S.SKIPPED
    with ledger.db.writing() as connection:
        connection.execute(update(points).where(points.c.id == point).values(state=state, reason=reason))
    assert steps(ledger) == []


@pytest.mark.parametrize(
    "told",
    [
        {"pin_proof": PinProof.UNPROVEN},
        {"weight_version": "whatever an eval function says"},
        {"weight_version": f"{digest_of(2)[:8]}.another-point.1"},
    ],
)
def test_what_was_not_seen_of_an_engine_of_ours_proves_nothing(ledger: Ledger, told: dict[str, Any]) -> None:
    proven(ledger, 1)
    proven(ledger, 2, **told)
    assert steps(ledger) == [1]
    assert not Proofs(ledger.db).has(digest_of(2))


def test_a_snapshot_that_came_to_hold_something_else_is_not_what_was_proven(ledger: Ledger) -> None:
    proven(ledger, 1)
    row = ledger.snapshot(1)
    ledger.moves.admit(row["id"], Facts(ledger.manifest(1, "e" * 32), vocab_size=32))
    assert steps(ledger) == []


def test_one_that_is_claimed_for_deletion_or_gone_or_of_a_run_that_goes_is_none_any_more(ledger: Ledger) -> None:
    for step in (1, 2):
        proven(ledger, step)
    assert ledger.retention.claim(ledger.snapshot(1)["id"])
    assert steps(ledger) == [2]
    assert ledger.retention.claim(ledger.snapshot(2)["id"])
    assert ledger.retention.deleted(ledger.snapshot(2)["id"])
    assert steps(ledger) == []
    assert Proofs(ledger.db).has(digest_of(2)), "that it was proven outlasts it"
    proven(ledger, 3)
    ledger.orders.delete_run("r1")
    assert steps(ledger) == []


def test_one_that_is_not_ours_counts_while_it_is_held_and_is_had_from_there(ledger: Ledger) -> None:
    proven(ledger, 1)
    row = ledger.snapshot(1)
    held = str(ledger.root / "r1" / ".held-0")
    ledger.moves.note_links(row["id"], held)
    (one,) = Proofs(ledger.db).others(ledger.manifest(99, IN_QUESTION))
    assert one.path == held
    ledger.moves.note_links(row["id"], held, "the file system has no hard links")
    assert steps(ledger) == [1]
    assert ledger.retention.let_go()
    assert steps(ledger) == []


def test_a_snapshot_of_another_model_tells_nothing(ledger: Ledger) -> None:
    proven(ledger, 1)
    entry = TensorEntry(name="w", dtype="F32", shape=(2, 3), file="config.json", xxh3_128="0" * 32)
    larger: Manifest = ledger.manifest(2, digest_of(2)).model_copy(update={"tensors": (entry,)})
    ledger.clock.turn(1)
    (ref,) = ledger.send(2, digest_of(2)).points
    ledger.look()
    ledger.moves.admit(ledger.snapshot(2)["id"], Facts(larger, vocab_size=32))
    ledger.go(ref.id, S.SCORING)
    finish(ledger, ref.id, digest_of(2))
    assert steps(ledger) == [1]
    in_question = larger.model_copy(update={"digest": IN_QUESTION})
    assert [one.manifest.step for one in Proofs(ledger.db).others(in_question)] == [2]


def test_a_manifest_that_can_not_be_read_keeps_nobody_from_the_others(ledger: Ledger) -> None:
    for step in (1, 2):
        proven(ledger, step)
    with ledger.db.writing() as connection:
        of_it = update(snapshots).where(snapshots.c.id == ledger.snapshot(2)["id"])
        connection.execute(of_it.values(manifest='{"of": "another version"}'))
    assert steps(ledger) == [1]
