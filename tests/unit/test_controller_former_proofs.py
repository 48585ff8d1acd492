"""Who is to blame for pins that fail under a controller that has proven nothing itself: former ones' proofs tell."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import EngineState
from eval_service.controller.db import LedgerThread
from eval_service.controller.engines import Good
from eval_service.controller.fleet import Fleet
from eval_service.controller.pin_orders import PinMaker
from eval_service.controller.pinning import Pinner, Verdict
from eval_service.engine.protocol import CommandKind, CommandResult, EngineReport, PinError, PinEvidence, PinOrder
from eval_service.fleet_config import GroupConfig, ServiceConfig
from eval_service.ledger.proofs import Proofs
from eval_service.objects.places import Places
from tests.support.ledger import Ledger, result

GROUP = GroupConfig.model_validate({"model": "/m", "grade": "fake"})
GOOD, SUSPECT = "a" * 32, "b" * 32


class Bench:
    """A controller that starts beside what its predecessors left, and one engine.

    `loads`: what of a digest's order the engine answers; it refuses what is not named.
    """

    def __init__(self, base: Path) -> None:
        self.ledger = Ledger(base)
        self.ledger.put_run(max_in_flight=50, suites=("main", "extra"))
        self.loads: dict[str, PinError | None] = {}
        self.asked: list[str] = []
        self.labels: list[str] = []
        self.before_load: Callable[[PinOrder], None] = lambda order: None
        self.roots: tuple[Path, ...] = (self.ledger.root,)
        self.memory: PinOrder | None = None

    def proven(self, step: int, digest: str, suite: str = "main", **changes: Any) -> None:
        """Under a predecessor."""
        self.ledger.clock.turn(1)
        point = self.ledger.queued(step, digest, suites=(suite,))
        self.ledger.go(point, PointState.SCORING)
        told = {"weight_version": f"{digest[:8]}.{point}.1"} | changes
        assert self.ledger.moves.finish(point, result(**told))

    def answer(self, _engine: str, kind: CommandKind, order: PinOrder | None = None) -> asyncio.Future[CommandResult]:
        future: asyncio.Future[CommandResult] = asyncio.get_running_loop().create_future()
        error: PinError | None = None
        evidence = None
        if order is not None:
            self.before_load(order)
            self.labels.append(order.weight_version)
            error = self.loads.get(order.manifest.digest, PinError.REFUSED)
            evidence = None if error else PinEvidence(order.weight_version, "another boot's", "logprobs", 0.0, 0, 0, 0)
        self.asked.append("restart" if order is None else order.manifest.digest[0])
        future.set_result(CommandResult("c", ok=error is None, error=error, detail="told", evidence=evidence))
        return future

    async def _pin(self, fleet: Fleet, step: int, digest: str) -> Verdict:
        ledger = LedgerThread()
        service = ServiceConfig(roots=self.roots, state_dir=self.ledger.base / "state")
        maker = PinMaker(
            fleet, service, 60.0, lambda: None, Places(), Proofs(self.ledger.db), ledger, clock=lambda: 0.0
        )
        (point,) = self.ledger.moves.runnable()
        pinner: Pinner = maker.pinner(point, self.ledger.manifest(step, digest), "1")
        poll = asyncio.create_task(fleet.poll(EngineReport("e", "eval", "n", EngineState.READY, 1, "boot", number=1)))
        await asyncio.sleep(0)  # it reports
        if self.memory is not None:
            fleet.prove("e", Good(self.memory, PinEvidence("v", "another boot's", "logprobs", 0.0, 0, 0, 0)))
        try:
            return (await pinner.pin("e")).verdict
        finally:
            poll.cancel()
            ledger.close()

    def verdict(self, step: int = 9, digest: str = SUSPECT, suite: str = "main") -> tuple[Verdict, bool]:
        """Of the first pin of a controller that has just begun; and whether the engine was quarantined."""
        self.ledger.queued(step, digest, suites=(suite,))
        self.ledger.take_over().recover()
        fleet = Fleet({"eval": GROUP}, epoch=2, lost_after_s=60.0, clock=lambda: 0.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fleet, "send", self.answer)
            verdict = asyncio.run(asyncio.wait_for(self._pin(fleet, step, digest), 60))
        return verdict, fleet.engines["e"].quarantined is not None


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_an_engine_that_loads_nothing_is_at_fault_by_what_was_proven_under_a_predecessor(bench: Bench) -> None:
    bench.proven(1, GOOD)
    assert bench.verdict() == (Verdict.ENGINE, True)
    assert bench.asked == ["b", "b", "restart", "a"]


def test_a_snapshot_that_fails_where_what_was_proven_loads_is_at_fault_on_good_grounds(bench: Bench) -> None:
    """Of another boot the engine's fingerprint may be another: that it loads, and its canary holds, is enough."""
    bench.proven(1, GOOD)
    bench.loads = {GOOD: None}
    assert bench.verdict() == (Verdict.SNAPSHOT, False)
    assert bench.asked == ["b", "b", "restart", "a", "b"]


def test_each_load_of_a_good_one_has_a_label_of_its_own(bench: Bench) -> None:
    """An engine that can't be started anew, and still tells the last one, must not pass for one that loaded it."""
    bench.proven(1, GOOD)
    bench.loads = {GOOD: None, SUSPECT: PinError.DIED}
    assert bench.verdict()[0] is Verdict.SNAPSHOT
    assert bench.asked == ["b", "b", "restart", "a", "b", "restart", "a", "b"]
    assert len({label for label in bench.labels if label.startswith(GOOD[:8])}) == 2


def test_where_nothing_was_proven_there_are_weak_grounds_alone(bench: Bench) -> None:
    """Neither what was skipped counts, nor what failed, nor what nobody proved."""
    ends = ((PointState.SKIPPED, Reason.PIN_VIOLATION), (PointState.FAILED, Reason.DEADLINE))
    for step, (state, reason) in enumerate(ends):
        point = bench.ledger.queued(step, f"{step}" * 32, suites=("main",))
        bench.ledger.go(point, PointState.RUNNING)
        assert bench.ledger.moves.end(point, state, reason, "as the test wants it")
    bench.proven(3, "3" * 32, pin_proof="unproven")
    assert bench.verdict() == (Verdict.SUSPECT, False)
    assert bench.asked == ["b", "b", "restart", "b"]


def test_where_what_was_proven_is_gone_from_storage_there_are_weak_grounds_alone(bench: Bench) -> None:
    bench.proven(1, GOOD)
    shutil.rmtree(bench.ledger.path(1, GOOD))
    assert bench.verdict() == (Verdict.SUSPECT, False)
    assert bench.asked == ["b", "b", "restart", "b"]


def test_the_next_good_one_is_asked_where_the_newest_is_gone(bench: Bench) -> None:
    bench.proven(1, GOOD)
    bench.proven(2, "c" * 32)
    shutil.rmtree(bench.ledger.path(2, "c" * 32))
    assert bench.verdict() == (Verdict.ENGINE, True)
    assert bench.asked == ["b", "b", "restart", "a"]


@pytest.mark.parametrize("error", [PinError.NOT_VISIBLE, PinError.DIED])
def test_a_good_one_that_is_deleted_in_the_midst_of_its_load_tells_nothing_of_the_engine(
    bench: Bench, error: PinError
) -> None:
    bench.proven(1, GOOD)
    bench.proven(2, "c" * 32)
    bench.loads = {"c" * 32: error, GOOD: None}

    def collected(order: PinOrder) -> None:
        if order.manifest.step == 2:
            shutil.rmtree(order.snapshot)

    bench.before_load = collected
    assert bench.verdict() == (Verdict.SNAPSHOT, False)
    assert bench.asked == ["b", "b", "restart", "c", "a", "b"]


def test_a_good_one_whose_files_are_not_all_there_tells_nothing_of_the_engine(bench: Bench) -> None:
    bench.proven(1, GOOD)
    bench.loads = {GOOD: PinError.NOT_VISIBLE}
    assert bench.verdict() == (Verdict.SUSPECT, False)


def test_what_lies_outside_of_the_roots_of_today_is_not_asked_for(bench: Bench) -> None:
    """The replica would refuse it, whatever it is worth."""
    bench.proven(1, GOOD)
    bench.roots = (bench.ledger.base / "elsewhere",)
    assert bench.verdict() == (Verdict.SUSPECT, False)


def test_a_snapshot_in_question_is_never_its_own_good_one_but_an_engine_of_which_nothing_is_known_does_not_outweigh_it(
    bench: Bench,
) -> None:
    bench.proven(9, SUSPECT)
    assert bench.verdict(suite="extra") == (Verdict.ENGINE, True)
    assert bench.asked == ["b", "b", "restart", "b"]


def test_a_snapshot_that_was_proven_under_a_predecessor_is_not_at_fault_before_a_second_engine_was_asked(
    bench: Bench,
) -> None:
    bench.proven(9, SUSPECT)
    bench.proven(1, GOOD)
    bench.loads = {GOOD: None}
    assert bench.verdict(suite="extra") == (Verdict.SUSPECT, False)


def test_the_ledger_is_not_asked_for_a_good_one_where_the_controller_has_seen_one_itself(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.proven(1, GOOD)
    own = bench.ledger.manifest(2, "c" * 32)
    bench.memory = PinOrder(str(bench.ledger.path(2, own.digest)), own, "cccccccc.1")
    bench.loads = {own.digest: None}
    monkeypatch.setattr(Proofs, "others", None)
    assert bench.verdict() == (Verdict.SNAPSHOT, False)


@contextmanager
def hanging() -> Iterator[Callable[[Any, str, str], bool]]:
    over = threading.Event()
    try:
        yield lambda places, snapshot, digest: over.wait()
    finally:
        over.set()


def test_a_storage_that_hangs_holds_up_no_pin_of_what_lies_elsewhere(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.proven(1, GOOD)
    monkeypatch.setattr("eval_service.controller.pinning.THERE_S", 0.0)
    with hanging() as there:
        monkeypatch.setattr(Places, "there", there)
        assert bench.verdict() == (Verdict.SUSPECT, False)
