"""What can't be sent is kept whole, once a reservation, and damage stops nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from eval_service.contract.outbox import Outbox
from eval_service.contract.wire import DispatchRequest, Receipt
from tests.support.tiny_snapshots import request


def kept(outbox: Outbox) -> list[DispatchRequest]:
    return [held for _, held in outbox.pending()]


def test_what_is_put_is_pending_in_the_order_of_steps_until_it_is_dropped(tmp_path: Path) -> None:
    outbox = Outbox.of(tmp_path, "r1")
    requests = [request("r1", step) for step in (30, 4, 20)]
    paths = [outbox.put(one) for one in requests]
    assert [held.step for held in kept(outbox)] == [4, 20, 30]
    outbox.drop(paths[1])
    outbox.drop(paths[1])
    assert [held.step for held in kept(outbox)] == [20, 30]
    assert kept(Outbox.of(tmp_path, "r1")) == kept(outbox), "another process sees the same"


def test_the_same_reservation_replaces_what_was_kept(tmp_path: Path) -> None:
    outbox = Outbox.of(tmp_path, "r1")
    first = request("r1", 4)
    outbox.put(first)
    outbox.put(first.model_copy(update={"export_s": 2.0}))
    assert [held.export_s for held in kept(outbox)] == [2.0]


def test_a_file_that_is_no_request_is_named_and_stops_nothing(tmp_path: Path) -> None:
    outbox = Outbox.of(tmp_path, "r1")
    good = request("r1", 4)
    outbox.put(good)
    bad = outbox.directory / "bad.json"
    bad.write_text('{"run": "r1", "step": -1}')
    assert kept(outbox) == [good]
    assert outbox.unreadable() == [bad]
    assert bad.exists()


def test_the_receipt_is_no_request(tmp_path: Path) -> None:
    outbox = Outbox.of(tmp_path, "r1")
    path = outbox.put_receipt(
        Receipt(drain="d", run="r1", open=False, drained=False, started_at=0.0, ended_at=1.0, deadline=1.0)
    )
    assert path.name == "receipt.json"
    assert Receipt.model_validate_json(path.read_bytes()).drained is False
    assert kept(outbox) == []
    assert outbox.unreadable() == []


def test_no_outbox_is_an_empty_one(tmp_path: Path) -> None:
    assert kept(Outbox.of(tmp_path, "r1")) == []


def test_a_full_disk_leaves_no_half_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    outbox = Outbox.of(tmp_path, "r1")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        outbox.put(request("r1", 4))
    assert list(outbox.directory.iterdir()) == []
