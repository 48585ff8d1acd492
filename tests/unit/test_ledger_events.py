"""What became of things is written with what became of them: in order, once, and none for what did not happen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from eval_service.contract.errors import Conflict
from eval_service.contract.states import PointState as S
from eval_service.contract.wire import DrainRequest, EngineState, FleetView, GroupView
from eval_service.ledger import events as events_module
from eval_service.ledger.changes import Changes
from eval_service.ledger.database import Database
from eval_service.ledger.events import EventLog
from tests.support.ledger import Ledger
from tests.support.views import engine


@pytest.fixture
def ledger(tmp_path: Path, database_url: str) -> Ledger:
    return Ledger(tmp_path, database_url)


def told(ledger: Ledger, after: int = 0) -> list[tuple[str, dict[str, Any]]]:
    return [(event.kind, json.loads(event.data)) for event in EventLog(ledger.db).after(after)]


def states(ledger: Ledger) -> list[tuple[str, str | None]]:
    return [(data["state"], data["reason"]) for kind, data in told(ledger) if kind == "point"]


def test_every_transition_of_a_point_is_told_once_and_in_order(ledger: Ledger) -> None:
    point = ledger.done(5)
    assert states(ledger) == [
        (state, None) for state in ("reserved", "queued", "pinning", "running", "scoring", "done")
    ]
    _, data = told(ledger)[-1]
    expected = {"run": "r1", "step": 5, "suite": "main", "point": point, "state": "done", "reason": None}
    assert data == expected | {"at": ledger.clock.now}


def test_an_end_is_told_with_its_reason(ledger: Ledger) -> None:
    ledger.put_run(max_in_flight=1)
    ledger.reserve(1)
    ledger.reserve(2)
    assert states(ledger) == [("reserved", None), ("skipped", "busy")]


def test_what_was_refused_or_repeated_is_not_told(ledger: Ledger) -> None:
    reservation = ledger.send(1).reservation
    before = len(told(ledger))
    ledger.send(1, reservation=reservation)
    with pytest.raises(Conflict):
        ledger.send(2, reservation=reservation)
    assert len(told(ledger)) == before


def test_a_drain_is_told_when_it_begins_and_when_it_ends(ledger: Ledger) -> None:
    drain = ledger.intents.begin_drain(DrainRequest(run="r1", timeout_s=60.0))
    ledger.intents.begin_drain(DrainRequest(run="r1", drain=drain, timeout_s=60.0))
    ledger.look()
    ledger.intents.end_drain(drain)
    found = [(data["state"], data["drained"]) for kind, data in told(ledger) if kind == "drain"]
    assert found == [("begun", None), ("ended", True)]


def fleet(*engines: tuple[str, EngineState]) -> FleetView:
    views = tuple(engine(id_, state=state) for id_, state in engines)
    return FleetView(
        groups=(GroupView(name="eval", kind="eval", grade="fake", desired=2, ready=1, engines=views),), seen_at=None
    )


def test_only_what_changed_of_the_fleet_is_told_also_by_a_new_controller(ledger: Ledger) -> None:
    ready, lost = EngineState.READY, EngineState.LOST
    ledger.moves.show_life(fleet(("a", ready), ("b", ready)))
    ledger.moves.show_life(fleet(("a", ready), ("b", ready)))
    ledger.take_over().show_life(fleet(("a", ready), ("b", lost)))
    ledger.moves.show_life(fleet(("b", lost)))
    found = [(data["engine"], data["was"], data["state"]) for kind, data in told(ledger) if kind == "fleet"]
    assert found == [("a", None, "ready"), ("b", None, "ready"), ("b", "ready", "lost"), ("a", "ready", None)]


def test_the_oldest_are_forgotten_and_no_number_is_used_twice(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "KEPT", 3)
    for step in range(5):
        ledger.send(step)
    ledger.retention.forget_events()
    assert EventLog(ledger.db).ends() == (3, 5)
    with ledger.db.writing() as connection:
        connection.exec_driver_sql("DELETE FROM events")
    ledger.send(6)
    assert EventLog(ledger.db).ends() == (6, 6)


def test_signs_of_life_are_no_change_and_whatever_else_is_written_is_one(ledger: Ledger) -> None:
    """An idle controller looks at the whole ledger only when somebody else wrote to it."""
    number = ledger.moves.changes()
    ledger.moves.show_life(fleet())
    assert ledger.moves.changes() == number
    ledger.orders.pause("r1")
    assert ledger.moves.changes() != number


def test_another_process_would_see_each_write_as_a_change(ledger: Ledger) -> None:
    other = Database(ledger.db.url, clock=ledger.clock)
    changes = Changes(other)
    number = changes()
    assert changes() == number
    ledger.moves.show_life(fleet())
    assert changes() != number
    changes.close()
    other.close()


def test_a_lost_connection_hides_no_change(ledger: Ledger) -> None:
    """A new one counts from the beginning, and may come to the very same number."""
    changes = Changes(ledger.db)
    number = changes()
    ledger.orders.pause("r1")
    changes.close()
    assert changes() != number
    changes.close()


@pytest.mark.parametrize("write", ["claim", "take_epoch"])
def test_what_must_outlive_a_power_cut_is_synced_with_all_that_came_before_it(tmp_path: Path, write: str) -> None:
    """A snapshot is deleted only once the ledger can't forget the result that made it needless."""
    ledger = Ledger(tmp_path)
    point = ledger.done(1)
    snapshot = ledger.snapshot(1)["id"]
    said: list[list[str]] = []
    event.listen(ledger.db.engine, "before_cursor_execute", lambda *args: said.append(args[2].split()[0:2]))
    event.listen(ledger.db.engine, "commit", lambda _: said.append(["COMMIT"]))
    assert ledger.retention.claim(snapshot) if write == "claim" else ledger.db.take_epoch()
    pragmas = [place for place, words in enumerate(said) if words[0] == "PRAGMA"]
    begin, commit = said.index(["BEGIN", "IMMEDIATE"]), said.index(["COMMIT"])
    assert len(pragmas) == 2
    assert pragmas[0] < begin < commit < pragmas[1]
    assert said[pragmas[0]][1] == "synchronous=FULL"
    assert ledger.state(point) is S.DONE


def test_what_was_committed_is_there_after_a_checkpoint_without_the_log(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.done(1)
    ledger.retention.tend()
    (ledger.base / "copy.db").write_bytes((ledger.base / "ledger.db").read_bytes())
    copy = Database(f"sqlite:///{ledger.base / 'copy.db'}", clock=ledger.clock)
    with copy.reading() as connection:
        assert connection.exec_driver_sql("SELECT state FROM points").scalars().all() == [S.DONE]
    copy.close()
