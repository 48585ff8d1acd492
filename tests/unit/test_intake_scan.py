"""The scan takes in what nobody POSTed, once, and nothing that is not what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from eval_service.contract import names
from eval_service.contract.outbox import Outbox
from eval_service.contract.wire import DispatchRequest, Receipt
from eval_service.intake import scan_run
from tests.support.tiny_snapshots import publish, request, tiny


def nothing_known(_: DispatchRequest) -> bool:
    return False


def test_a_snapshot_published_by_a_trainer_that_died_is_found(tmp_path: Path) -> None:
    published = publish(tiny(), tmp_path, requests=2)
    scan = scan_run(tmp_path, "r1", nothing_known)
    assert [found.request.snapshot for found in scan.found] == [str(published.path)] * 2
    assert {found.request.digest for found in scan.found} == {published.manifest.digest}
    assert scan.damaged == []
    assert scan.sent == []


def test_what_the_ledger_has_is_not_found_again(tmp_path: Path) -> None:
    publish(tiny(), tmp_path)
    assert scan_run(tmp_path, "r1", lambda _: True).found == []


def test_a_reservation_that_the_ledger_has_without_its_snapshot_is_still_taken_in(tmp_path: Path) -> None:
    publish(tiny(), tmp_path)
    with_snapshot: set[str] = set()
    assert len(scan_run(tmp_path, "r1", lambda r: r.reservation in with_snapshot).found) == 1


def test_snapshots_come_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for step in (100, 9, 20):
        publish(tiny(), tmp_path, step=step)
    assert [found.request.step for found in scan_run(tmp_path, "r1", nothing_known).found] == [9, 20, 100]


def test_a_partial_or_unmarked_directory_is_invisible(tmp_path: Path) -> None:
    first = publish(tiny(), tmp_path, step=1).path
    (first / names.COMPLETE).unlink()
    second = publish(tiny(), tmp_path, step=2).path
    second.rename(second.with_name(names.partial_name("ab" * 8)))
    scan = scan_run(tmp_path, "r1", nothing_known)
    assert (scan.found, scan.damaged) == ([], [])


def test_a_run_without_a_directory_has_nothing(tmp_path: Path) -> None:
    scan = scan_run(tmp_path, "r1", nothing_known)
    assert (scan.found, scan.damaged, scan.sent) == ([], [], [])


def test_the_outbox_is_taken_in_and_its_sent_files_are_named(tmp_path: Path) -> None:
    published = publish(tiny(), tmp_path, requests=0)
    outbox = Outbox.of(tmp_path, "r1")
    kept = request("r1", 4, snapshot=str(published.path), digest=published.manifest.digest, deferred=True)
    path = outbox.put(kept)
    outbox.put_receipt(Receipt(drain="d", run="r1", open=False, drained=False, started_at=0, ended_at=1, deadline=1))
    scan = scan_run(tmp_path, "r1", nothing_known)
    assert [(found.request, found.path, found.in_outbox) for found in scan.found] == [(kept, path, True)]
    assert scan.damaged == []
    assert scan_run(tmp_path, "r1", lambda _: True).sent == [path]


def test_a_reservation_in_the_outbox_and_published_is_found_once_as_deferred(tmp_path: Path) -> None:
    published = publish(tiny(), tmp_path)
    (listed,) = json.loads((published.path / names.DISPATCH).read_text())
    Outbox.of(tmp_path, "r1").put(DispatchRequest.model_validate({**listed, "deferred": True}))
    scan = scan_run(tmp_path, "r1", nothing_known)
    assert [found.request.deferred for found in scan.found] == [True]


Edit = Callable[[dict[str, object], Path], object]
DAMAGE: dict[str, Edit] = {
    "another_run": lambda r, _: {**r, "run": "r2"},
    "another_step": lambda r, _: {**r, "step": 5},
    "a_negative_step": lambda r, _: {**r, "step": -1},
    "another_digest": lambda r, _: {**r, "digest": "0" * 32},
    "no_digest": lambda r, _: {**r, "digest": None},
    "another_directory": lambda r, place: {**r, "snapshot": str(place.parent)},
    "no_snapshot": lambda r, _: {**r, "snapshot": None},
    "a_path_that_can_not_be_one": lambda r, _: {**r, "snapshot": "/a\0b"},
    "a_callers_source": lambda r, _: {**r, "source": "caller"},
    "an_unknown_field": lambda r, _: {**r, "scorer": "os:system"},
    "no_table": lambda r, _: "x",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_published_request_that_is_not_its_directorys_is_told_and_stops_nothing(damage: str, tmp_path: Path) -> None:
    bad = publish(tiny(), tmp_path, step=4).path
    publish(tiny(), tmp_path, step=8)
    (listed,) = json.loads((bad / names.DISPATCH).read_text())
    (bad / names.DISPATCH).write_text(json.dumps([DAMAGE[damage](listed, bad)]))
    scan = scan_run(tmp_path, "r1", nothing_known)
    assert [found.request.step for found in scan.found] == [8]
    assert [damaged.path for damaged in scan.damaged] == [bad / names.DISPATCH]
    assert scan.damaged[0].message


@pytest.mark.parametrize("content", [b"", b"{", b"[]x", b"\xff\xfe", b"null"])
def test_a_file_that_is_no_json_is_told_and_stops_nothing(content: bytes, tmp_path: Path) -> None:
    bad = publish(tiny(), tmp_path, step=4).path
    (bad / names.DISPATCH).write_bytes(content)
    outbox = Outbox.of(tmp_path, "r1")
    outbox.directory.mkdir()
    (outbox.directory / "x.json").write_bytes(content)
    publish(tiny(), tmp_path, step=8)
    scan = scan_run(tmp_path, "r1", nothing_known)
    assert [found.request.step for found in scan.found] == [8]
    assert {damaged.path.name for damaged in scan.damaged} == {"x.json", names.DISPATCH}


def test_a_missing_or_linked_request_file_is_told(tmp_path: Path) -> None:
    bad = publish(tiny(), tmp_path, step=4).path
    moved = (bad / names.DISPATCH).rename(tmp_path / "elsewhere.json")
    assert len(scan_run(tmp_path, "r1", nothing_known).damaged) == 1
    (bad / names.DISPATCH).symlink_to(moved)
    scan = scan_run(tmp_path, "r1", nothing_known)
    assert (len(scan.found), len(scan.damaged)) == (0, 1)


def test_a_linked_snapshot_directory_is_not_looked_into(tmp_path: Path) -> None:
    published = publish(tiny(), tmp_path / "other")
    (tmp_path / "r1").mkdir()
    (tmp_path / "r1" / published.path.name).symlink_to(published.path)
    scan = scan_run(tmp_path, "r1", nothing_known)
    assert (scan.found, scan.damaged) == ([], [])


@pytest.mark.parametrize("changes", [{"snapshot": None}, {"snapshot": "/elsewhere/step_4-00000000"}, {"run": "r2"}])
def test_an_outbox_request_of_no_snapshot_another_place_or_run_is_told(
    changes: dict[str, object], tmp_path: Path
) -> None:
    sound = request("r1", 4, snapshot=str(tmp_path / "r1" / "step_4-00000000"), digest="0" * 32)
    Outbox.of(tmp_path, "r1").put(sound.model_copy(update=changes))
    scan = scan_run(tmp_path, "r1", nothing_known)
    assert (len(scan.found), len(scan.damaged)) == (0, 1)


def test_a_reused_checkpoint_may_lie_outside_the_runs_directory(tmp_path: Path) -> None:
    Outbox.of(tmp_path, "r1").put(request("r1", 4, snapshot=str(tmp_path / "ckpt" / "step_4"), source="reuse"))
    assert len(scan_run(tmp_path, "r1", nothing_known).found) == 1


def test_the_scan_only_reads(tmp_path: Path) -> None:
    publish(tiny(), tmp_path)
    Outbox.of(tmp_path, "r1").put(request("r1", 4, snapshot=str(tmp_path / "r1" / "x"), digest="0" * 32))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    scan_run(tmp_path, "r1", lambda _: True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
