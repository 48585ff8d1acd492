"""What GC would delete: `keep` of each run stay, and never anything that is in use or not ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval_service.contract.wire import Source
from eval_service.gc.plan import Leftover, LeftoverKind, SnapshotRow, plan_deletions, plan_leftovers
from tests.support.properties import steady

FLAGS = ("reserved", "queued", "leased", "pinned", "best", "held")


def row(step: int, **changes: Any) -> SnapshotRow:
    run = changes.get("run", "r1")
    base = SnapshotRow(
        id=f"{run}-{step}",
        run=run,
        step=step,
        digest=f"{step:032x}",
        path=f"/root/{run}/step_{step}-{step:08x}",
        source=Source.STAGING,
        nonce=f"{step:032x}",
        settled_at=0.0,
    )
    return replace(base, **changes)


def steps(rows: list[SnapshotRow], keep: int = 2) -> list[int]:
    return [deletion.step for deletion in plan_deletions(rows, {"r1": keep})]


def test_the_most_recently_settled_are_kept_whatever_their_step() -> None:
    rows = [row(10, settled_at=4.0), row(20, settled_at=3.0), row(30, settled_at=2.0), row(40, settled_at=1.0)]
    assert steps(rows) == [40, 30]


def test_keep_zero_deletes_all_that_settled() -> None:
    assert steps([row(1, settled_at=1.0), row(2, settled_at=2.0), row(3, settled_at=None)], keep=0) == [1, 2]


@pytest.mark.parametrize("flag", FLAGS)
def test_nothing_in_use_is_deleted(flag: str) -> None:
    rows = [row(1, settled_at=1.0, **{flag: True}), row(2, settled_at=2.0)]
    assert steps(rows, keep=0) == [2]


@pytest.mark.parametrize("source", [Source.REUSE, Source.CALLER])
def test_what_is_not_our_own_export_is_never_deleted(source: Source) -> None:
    assert steps([row(1, source=source)], keep=0) == []


def test_a_snapshot_without_a_nonce_is_never_deleted() -> None:
    assert steps([row(1, nonce=None)], keep=0) == []


def test_a_run_whose_keep_is_not_known_keeps_all() -> None:
    assert plan_deletions([row(1, run="r2")], {"r1": 0}) == ()


def test_a_directory_that_another_row_still_needs_is_not_deleted() -> None:
    old = row(1, settled_at=1.0)
    again = replace(old, id="again", settled_at=None, queued=True)
    assert steps([old, again], keep=0) == []
    reused = replace(old, id="reused", run="r2", source=Source.CALLER, settled_at=None)
    assert steps([old, reused], keep=0) == []


def test_each_run_keeps_its_own_number() -> None:
    rows = [row(step, run=run, settled_at=float(step)) for run in ("r1", "r2") for step in (1, 2, 3)]
    assert [(d.run, d.step) for d in plan_deletions(rows, {"r1": 1, "r2": 2})] == [("r1", 1), ("r2", 1), ("r1", 2)]


@st.composite
def ledgers(draw: st.DrawFn) -> list[SnapshotRow]:
    return [
        row(
            step,
            run=draw(st.sampled_from(["r1", "r2"])),
            source=draw(st.sampled_from(list(Source))),
            settled_at=draw(st.none() | st.floats(0, 100)),
            path=f"/root/{draw(st.integers(0, 6))}",
            **{flag: draw(st.integers(0, 5)) == 0 for flag in FLAGS},
        )
        for step in range(draw(st.integers(0, 8)))
    ]


@steady
@given(ledgers(), st.integers(0, 3))
def test_no_plan_touches_what_is_needed_and_every_run_is_left_its_keep(rows: list[SnapshotRow], keep: int) -> None:
    planned = {deletion.id for deletion in plan_deletions(rows, {"r1": keep, "r2": keep})}
    gone = [r for r in rows if r.id in planned]
    left = [r for r in rows if r.id not in planned]
    assert all(r.source is Source.STAGING and r.settled_at is not None and not r.in_use for r in gone)
    assert not {r.path for r in gone} & {r.path for r in left}
    for run in ("r1", "r2"):
        ours = [r for r in rows if r.run == run and r.source is Source.STAGING and r.settled_at is not None]
        assert len([r for r in ours if r.id not in planned]) >= min(keep, len(ours))


def test_a_plan_carried_out_leaves_nothing_to_plan() -> None:
    rows = [row(step, settled_at=float(step)) for step in range(6)]
    gone = {deletion.id for deletion in plan_deletions(rows, {"r1": 2})}
    assert plan_deletions([r for r in rows if r.id not in gone], {"r1": 2}) == ()


def leftover(kind: LeftoverKind, touched_at: float, run: str = "r1") -> Leftover:
    return Leftover(run, f".{kind}-0", kind, touched_at)


def test_trash_is_always_swept_and_what_is_half_written_only_when_nobody_can_be_writing_it() -> None:
    trash = leftover(LeftoverKind.TRASH, 99.0)
    idle = leftover(LeftoverKind.PARTIAL, 0.0)
    fresh = leftover(LeftoverKind.PARTIAL, 95.0)
    exporting = leftover(LeftoverKind.PARTIAL, 0.0, run="r2")
    half = leftover(LeftoverKind.HALF, 0.0, run="r2")
    being_written = leftover(LeftoverKind.HALF, 95.0)
    found = [trash, idle, fresh, exporting, half, being_written]
    planned = plan_leftovers(found, {"r2"}, now=100.0, idle_s=10.0)
    assert planned == (trash, idle, half)
