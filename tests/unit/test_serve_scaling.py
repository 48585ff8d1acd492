"""Serve's policy follows the count that the service shows, and neither blocks nor raises on the way."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval_service.contract.wire import FleetView, GroupView
from eval_service.ledger.database import Database
from eval_service.ledger.moves import Moves
from eval_service.serve import scaling
from eval_service.serve.scaling import DesiredCount

CONTEXT: Any = SimpleNamespace(target_num_replicas=7)


def show(url: str, desired: int) -> None:
    """What a controller would have written."""
    database = Database(url)
    group = GroupView(name="eval", kind="pinned", grade="fake", desired=desired, ready=0, engines=())
    moves = Moves(database, database.take_epoch(), max_attempts=1)
    moves.show_life(FleetView(groups=(group,), seen_at=None))
    database.close()


def until(policy: DesiredCount, count: int) -> None:
    """Ask as Serve does, over and over, until it says so."""
    deadline = time.monotonic() + 20.0
    while policy(CONTEXT)[0] != count:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_a_group_stays_as_it_is_until_a_controller_of_now_has_decided_and_then_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "LOOK_EVERY_S", 0.01)
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    show(url, 4)  # by an earlier service
    policy = DesiredCount(url, "eval")
    for _ in range(20):
        assert policy(CONTEXT)[0] == 7
        threading.Event().wait(0.01)
    for desired in (3, 0, 2):
        show(url, desired)
        until(policy, desired)


def test_a_ledger_that_cannot_be_read_leaves_the_count_and_raises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "LOOK_EVERY_S", 0.01)
    file = tmp_path / "ledger.db"
    policy = DesiredCount(f"sqlite:///{file}", "eval")
    show(f"sqlite:///{file}", 3)
    until(policy, 3)
    file.write_bytes(b"no ledger")
    for _ in range(20):
        assert policy(CONTEXT) == (3, {})
        threading.Event().wait(0.01)


def test_a_host_that_has_no_thread_left_costs_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "LOOK_EVERY_S", 0.0)
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    policy = DesiredCount(url, "eval")
    show(url, 3)

    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        assert policy(CONTEXT)[0] == 7
    until(policy, 3)
