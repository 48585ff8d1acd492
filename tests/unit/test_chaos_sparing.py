"""Who is spared: by what the kit does alone, no sound snapshot comes to look like a bad one."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval_service.chaos import inject, victims
from eval_service.chaos.faults import SPOILS_PINS, TWICE_LOOKS_BAD, Fault, FaultKind
from eval_service.chaos.inject import Injector
from eval_service.chaos.knobs import Knob
from eval_service.chaos.records import Records
from eval_service.chaos.sparing import MOST, Sparing, Spoiling
from eval_service.chaos.victims import Part, replica_of
from eval_service.contract.states import PointState
from eval_service.engine.fake import Knobs, Orders
from tests.support.ledger import Ledger

REFUSE, WRONG, KILL = FaultKind.REFUSE_UPDATE, FaultKind.WRONG_WEIGHTS, FaultKind.KILL_ENGINE
ONE, OTHER = ("p", 1), ("q", 1)


@dataclass(slots=True)
class Stage:
    """A ledger with open attempts, and what is given while they go on."""

    attempts: set[tuple[str, int]] = field(default_factory=set)
    readable: bool = True
    ended: set[int] = field(default_factory=set)  # numbers of what was given, in turn
    unfelt: set[int] = field(default_factory=set)
    given: int = 0

    def __post_init__(self) -> None:
        self.sparing = Sparing(lambda: frozenset(self.attempts) if self.readable else None)

    sparing: Sparing = field(init=False)

    def grants(self, kind: FaultKind, replica: int = 1) -> bool:
        number = self.given
        self.given += 1
        over, felt = lambda: number in self.ended, lambda: number not in self.unfelt
        return self.sparing.grant(Spoiling(kind, replica, over, felt))


@pytest.mark.parametrize("kind", sorted(TWICE_LOOKS_BAD))
def test_what_looks_bad_twice_comes_to_an_engine_again_only_when_whoever_felt_it_has_ended(kind: FaultKind) -> None:
    stage = Stage({ONE})
    assert stage.grants(kind)
    assert not stage.grants(kind), "it is at work"
    stage.ended = {0}
    assert not stage.grants(kind), "the attempt that felt it goes on, and with it the proof of the engine started anew"
    assert stage.grants(kind, replica=2)
    stage.attempts = {OTHER}
    assert stage.grants(kind), "who began later has not felt it"


def test_what_befalls_engines_by_itself_comes_twice() -> None:
    stage = Stage({ONE})
    assert [stage.grants(KILL) for _ in range(3)] == [True, True, False]


def test_no_third_fault_of_any_kind_comes_to_an_engine_within_an_attempt() -> None:
    stage = Stage({ONE})
    assert [stage.grants(kind) for kind in (REFUSE, KILL, WRONG)] == [True, True, False]
    stage.ended = {0, 1}
    assert not stage.grants(WRONG)
    stage.attempts = set()
    assert stage.grants(WRONG)


def test_what_nobody_felt_stands_in_nobodys_way_and_an_unread_ledger_frees_nothing() -> None:
    stage = Stage({ONE}, ended={0}, unfelt={0})
    assert stage.grants(REFUSE)
    stage.readable = False
    assert not stage.grants(REFUSE)
    stage.readable = True
    assert stage.grants(REFUSE)


def test_an_attempt_that_begins_as_it_is_seen_to_be_over_may_have_felt_it() -> None:
    stage = Stage()

    def over() -> bool:
        stage.attempts.add(ONE)
        return True

    assert stage.sparing.grant(Spoiling(REFUSE, 1, over))
    assert not stage.grants(REFUSE)


STEPS = st.one_of(
    st.tuples(st.just("begin"), st.integers(0, 3)),
    st.tuples(st.just("end"), st.integers(0, 3)),
    st.tuples(st.just("over"), st.integers(0, 30)),
    st.tuples(st.sampled_from(sorted(SPOILS_PINS)), st.integers(0, 1)),
)


@given(st.lists(STEPS, max_size=60))
def test_whatever_comes_when_no_attempt_sees_an_engine_spoiled_twice_alike_or_three_times(steps: list[Any]) -> None:
    stage = Stage()
    at_work: dict[int, tuple[int, FaultKind]] = {}
    seen: dict[tuple[str, int], set[int]] = {}  # of each open attempt: what was at work meanwhile
    granted: dict[int, tuple[int, FaultKind]] = {}
    for number, (what, which) in enumerate(steps):
        if what == "begin":
            seen[str(which), number] = set(at_work)
        elif what == "end":
            seen = {attempt: felt for attempt, felt in seen.items() if attempt[0] != str(which)}
        elif what == "over":
            if at_work.pop(which, None) is not None:
                stage.ended.add(which)
        elif stage.grants(what, which):
            granted[stage.given - 1] = at_work[stage.given - 1] = (which, what)
            for felt in seen.values():
                felt.add(stage.given - 1)
        stage.attempts = set(seen)
        for felt in seen.values():
            for replica in (0, 1):
                kinds = [kind for one in felt for where, kind in [granted[one]] if where == replica]
                assert len(kinds) <= MOST
                assert all(kinds.count(kind) < 2 for kind in TWICE_LOOKS_BAD)


# --- the injector asks, for a process by its replica


@dataclass(frozen=True, slots=True)
class Process:
    pid: int  # and its replica is a hundred more


def injector(stage: Stage, processes: list[Any], place: Path, patch: pytest.MonkeyPatch) -> Injector:
    patch.setattr(inject, "replica_of", lambda process: process.pid + 100)
    found: Any = SimpleNamespace(stopped=[], find=lambda _part: processes)
    service: Any = SimpleNamespace(world=SimpleNamespace(orders=place))
    records: Any = SimpleNamespace(open_attempts=lambda: frozenset(stage.attempts))
    client: Any = None
    return Injector(service, found, records, client, print, 0.0)


def a_fault(number: int, kind: FaultKind, *, pick: float = 0.0, times: int = 1) -> Fault:
    return Fault(number, kind, 0, pick, times, None, 0.0)


def test_an_engine_that_may_not_be_hit_now_gives_way_to_the_next_and_none_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage({ONE})
    waited: list[float] = []

    def wait_until(look: Callable[[], bool], timeout_s: float) -> bool:
        if look():
            return True
        waited.append(timeout_s)
        stage.attempts.clear()
        return look()

    monkeypatch.setattr(inject, "wait_until", wait_until)
    one = injector(stage, [Process(1), Process(2)], tmp_path, monkeypatch)
    chosen = []
    for number in range(3):
        chosen.append(one._victim(a_fault(number, WRONG, pick=0.9), Part.ENGINE))
        one._ended[number].set()
    assert chosen == [Process(2), Process(1), Process(2)]
    assert len(waited) == 1


def test_only_engines_that_may_feel_a_knob_are_told_and_the_others_when_their_attempt_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a list ends with a kind, and the next one begins with it: the engine is being proven by then."""
    stage = Stage({ONE})
    felt: list[str] = []

    def wait_until(look: Callable[[], bool], _timeout_s: float) -> bool:
        if look():
            return True
        for order in tmp_path.glob("*.json"):  # who is told feels it
            order.unlink()
            felt.append(REFUSE)
            (tmp_path / f"{order.name.split('-')[0]}.felt").write_text("\n".join(felt))
        return look()

    monkeypatch.setattr(inject, "wait_until", wait_until)
    monkeypatch.setattr("eval_service.chaos.knobs.alive", lambda _process: True)
    one = injector(stage, [Process(1)], tmp_path, monkeypatch)
    assert one._turn(a_fault(1, REFUSE)) == (True, "pid 1, 1 times")
    assert one._turn(a_fault(2, REFUSE)) == (False, "no engine")
    assert not list(tmp_path.glob("*.json"))
    stage.attempts = {OTHER}
    assert one._turn(a_fault(3, REFUSE)) == (True, "pid 1, 1 times")


def test_who_does_not_feel_a_knob_is_told_that_it_is_off_also_when_the_waiting_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval_service.chaos.knobs.alive", lambda _process: True)
    one = injector(Stage(), [Process(1), Process(2)], tmp_path, monkeypatch)

    def wait_until(look: Callable[[], bool], timeout_s: float) -> bool:
        if timeout_s == inject._FELT_S:
            (tmp_path / "2.felt").write_text(REFUSE)
        return look()

    def times(pid: int) -> list[int]:
        return [json.loads(order.read_text())["times"] for order in sorted(tmp_path.glob(f"{pid}-*.json"))]

    monkeypatch.setattr(inject, "wait_until", wait_until)
    assert one._turn(a_fault(1, REFUSE, times=3)) == (True, "pid 2, 3 times")
    assert (times(1), times(2)) == ([3, 0], [3])

    def broken(look: Callable[[], bool], timeout_s: float) -> bool:
        if timeout_s == inject._FELT_S:
            raise RuntimeError("the disk is gone")
        return look()

    monkeypatch.setattr(inject, "wait_until", broken)
    with pytest.raises(RuntimeError, match="disk"):
        one._turn(a_fault(2, FaultKind.STALE_SAMPLES, times=2))
    assert (times(1), times(2)) == ([3, 0, 2, 0], [3, 2, 0])


def test_only_what_spoils_pins_is_asked_for_and_nobodys_process_is_not_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage({ONE})
    one = injector(stage, [Process(1)], tmp_path, monkeypatch)
    asked: list[Spoiling] = []

    def grant(_self: Sparing, spoiling: Spoiling) -> bool:
        asked.append(spoiling)
        return True

    monkeypatch.setattr(Sparing, "grant", grant)
    held: Any = Process(1)
    for kind in FaultKind:
        assert one._may_hit(a_fault(0, kind), held)
    assert {spoiling.kind for spoiling in asked} == SPOILS_PINS
    monkeypatch.setattr(inject, "replica_of", lambda _process: None)
    assert not one._may_hit(a_fault(0, KILL), held)
    assert one._may_hit(a_fault(0, FaultKind.KILL_GATEWAY), held)


def test_who_is_killed_or_stopped_counts_until_the_fault_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inject, "wait_until", lambda look, _timeout_s: look())
    one = injector(Stage(), [Process(1)], tmp_path, monkeypatch)
    stop = a_fault(0, FaultKind.STOP_ENGINE)
    chosen: list[Any] = []

    def do(fault: Fault) -> tuple[bool, str]:
        chosen.extend(one._victim(fault, Part.ENGINE) for _ in range(MOST + 1))
        return True, ""

    monkeypatch.setattr(Injector, "_do", lambda _self, fault: do(fault))
    one._guarded(stop)
    assert chosen == [Process(1), Process(1), None]
    one._guarded(stop)
    assert chosen == [Process(1), Process(1), None] * 2


# --- a knob at one engine


@pytest.fixture
def orders(tmp_path: Path) -> tuple[Orders, Knobs]:
    knobs = Knobs()
    return Orders(tmp_path, knobs), knobs


def test_a_knob_is_over_when_it_has_bitten_so_often_or_the_engine_has_taken_it_back(
    tmp_path: Path, orders: tuple[Orders, Knobs]
) -> None:
    asyncio.run(_knob(tmp_path, *orders))


async def _knob(place: Path, orders: Orders, knobs: Knobs) -> None:
    async def obeyed() -> None:
        async with asyncio.timeout(60):
            while list(place.glob("*.json")):  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(0.01)

    obeying = asyncio.create_task(orders.obey())
    try:
        knob = Knob(place, psutil.Process(os.getpid()), a_fault(7, REFUSE, times=2))
        knob.on()
        await obeyed()
        assert knobs.refuse_update
        orders.felt(REFUSE)
        assert (knob.bitten(), knob.over()) == (True, False)
        orders.felt(REFUSE)
        assert (knob.over(), knobs.refuse_update) == (True, False)
        again = Knob(place, psutil.Process(os.getpid()), a_fault(8, REFUSE, times=2))
        again.on()
        again.off()
        assert not again.over(), "it may still be read as on"
        await obeyed()
        assert (again.bitten(), again.over(), knobs.refuse_update) == (False, True, False)
    finally:
        obeying.cancel()


def test_a_knob_at_a_server_that_is_gone_is_over_and_a_second_try_is_not_taken_back_by_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = True
    monkeypatch.setattr("eval_service.chaos.knobs.alive", lambda _process: lives)
    knobs = Knobs()
    orders, here = Orders(tmp_path, knobs), psutil.Process(os.getpid())
    first, second = (Knob(tmp_path, here, a_fault(3, REFUSE)) for _ in range(2))
    first.on()
    first.off()
    second.on()
    for path in sorted(tmp_path.glob(f"{here.pid}-*.json")):  # it looks only now
        orders._take(**json.loads(path.read_text()))
    assert knobs.refuse_update
    assert not second.over()
    lives = False
    assert second.over()


# --- what it is told


def test_open_attempts_are_told_from_the_ledger_and_not_known_where_it_cannot_be_read(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    goes_on, _ = ledger.live(PointState.PINNING, 1), ledger.done(2)
    records, none = Records(ledger.base / "ledger.db"), Records(ledger.base / "none.db")
    assert records.open_attempts() == frozenset({(goes_on, 1)})
    assert none.open_attempts() is None
    for one in (records, none):
        one.close()
    ledger.db.close()


def test_a_server_is_its_replicas_and_one_that_is_gone_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    here = psutil.Process(os.getpid())
    replica = here.parent()
    assert replica is not None
    monkeypatch.setattr(victims, "_command", lambda one: Part.REPLICA if one.pid == replica.pid else "")
    assert (replica_of(here), replica_of(replica)) == (replica.pid, replica.pid)
    monkeypatch.setattr(victims, "_command", lambda _: "")
    assert replica_of(here) is None
