"""Who is to blame for pins that fail: the verdict on one engine over answers that the tests write down."""

from __future__ import annotations

import asyncio
import threading
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from eval_service.chaos.faults import SPOILS_PINS, TWICE_LOOKS_BAD, FaultKind
from eval_service.chaos.sparing import MOST
from eval_service.contract.wire import EngineState
from eval_service.controller import pinning
from eval_service.controller.engines import Good
from eval_service.controller.fleet import Fleet
from eval_service.controller.pinning import Pinner, Verdict
from eval_service.engine.protocol import CommandKind, CommandResult, EngineReport, PinError, PinEvidence
from eval_service.fleet_config import GroupConfig

GROUP = GroupConfig.model_validate({"model": "/m", "grade": "fake"})
EVIDENCE = PinEvidence("v", "f", "logprobs", 0.0, 0.0, 0.0, 0.0)
FINE = None


def order_of(digest: str) -> Any:
    return SimpleNamespace(
        snapshot="/s",
        timeout_s=60.0,
        visibility_timeout_s=60.0,
        manifest=SimpleNamespace(digest=digest, tensor_digest=digest),
    )


class Bench:
    """One engine that has held a good snapshot, and fails the pins of another one as it is told."""

    def __init__(self, failures: list[PinError | None]) -> None:
        self.failures = failures
        self.is_lost_at_last = False
        self.asked: list[str] = []
        self.fleet = Fleet({"eval": GROUP}, epoch=1, lost_after_s=60.0, clock=lambda: 0.0)
        self.order, self.goods = order_of("new"), [order_of("good")]  # the last one first
        self.evidence: PinEvidence | None = EVIDENCE
        self.refusal = PinError.REFUSED  # of the good ones that it does not load
        self.loads: list[str] | None = None  # of the good ones; None: all
        self.pinner = Pinner(self.fleet, self.order, restart_timeout_s=60.0, there=lambda snapshot, digest: True)

    def answer(self, _engine: str, kind: CommandKind, order: Any = None) -> asyncio.Future[CommandResult]:
        future: asyncio.Future[CommandResult] = asyncio.get_running_loop().create_future()
        self.asked.append("restart" if kind is CommandKind.RESTART else order.manifest.digest)
        refused = self.loads is not None and order is not None and order.manifest.digest not in self.loads
        error = self.failures.pop(0) if order is self.order else self.refusal if refused else FINE
        if self.is_lost_at_last and not self.failures:
            self.fleet.engines["e"].lost = True
        evidence = None if error else EVIDENCE
        future.set_result(CommandResult("c", ok=error is FINE, error=error, detail="told", evidence=evidence))
        return future

    async def verdict(self) -> Verdict:
        report = EngineReport("e", "eval", "n", EngineState.READY, 1, "boot", number=1)
        poll = asyncio.create_task(self.fleet.poll(report))
        await asyncio.sleep(0)  # it reports
        for good in reversed(self.goods):
            self.fleet.prove("e", Good(good, self.evidence))
        try:
            return (await self.pinner.pin("e")).verdict
        finally:
            poll.cancel()


def verdict_of(*failures: PinError | None, lost: bool = False) -> tuple[Verdict, list[str], int]:
    """The verdict, what the engine was asked, and how many of the failures it did not come to; lost: at the last."""
    bench = Bench(list(failures))
    bench.is_lost_at_last = lost
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.fleet, "send", bench.answer)
        verdict = asyncio.run(asyncio.wait_for(bench.verdict(), 60))
    return verdict, bench.asked, len(bench.failures)


PROOF = ["restart", "good", "new"]


@pytest.mark.parametrize("error", [PinError.CANARY, PinError.REFUSED])
def test_a_snapshot_that_fails_alike_after_one_proof_of_the_engine_is_to_blame(error: PinError) -> None:
    assert verdict_of(error, error, error) == (Verdict.SNAPSHOT, ["new", "new", *PROOF], 0)


@pytest.mark.parametrize("evidence", [EVIDENCE, None])  # None: it is recalled
@pytest.mark.parametrize(
    ("goods", "loads", "verdict"),
    [
        (["new", "good"], ["good"], Verdict.SUSPECT),  # proven before, its bytes may have gone bad since
        (["new", "good"], [], Verdict.ENGINE),
        (["new"], [], Verdict.ENGINE),  # it can't load what it was proven to hold
        (["new"], ["new"], Verdict.SUSPECT),
    ],
)
def test_an_engine_that_fails_on_what_was_proven_before_is_told_from_the_snapshot_by_one_of_other_weights_if_any(
    goods: list[str], loads: list[str], verdict: Verdict, evidence: PinEvidence | None
) -> None:
    """An attempt or a suite before this one proved it, maybe under another controller."""
    bench = Bench([PinError.CANARY] * 3)
    bench.goods = [order_of(name) for name in goods]
    bench.loads, bench.evidence = loads, evidence
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.fleet, "send", bench.answer)
        assert asyncio.run(asyncio.wait_for(bench.verdict(), 60)) is verdict
    assert bench.asked[:4] == ["new", "new", "restart", goods[-1]]


@pytest.mark.parametrize(("goods", "verdict"), [(["new", "good"], Verdict.ENGINE), (["good"], Verdict.SUSPECT)])
def test_an_engine_that_keeps_what_it_had_in_place_of_what_was_proven_before_is_at_fault(
    goods: list[str], verdict: Verdict
) -> None:
    """The good one may be what it boots with, which it "loads" by loading nothing."""
    bench = Bench([PinError.UNCHANGED] * 3)
    bench.goods = [order_of(name) for name in goods]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.fleet, "send", bench.answer)
        assert asyncio.run(asyncio.wait_for(bench.verdict(), 60)) is verdict


@pytest.mark.parametrize("gone", [PinError.NOT_VISIBLE, PinError.STORE])
def test_a_good_snapshot_that_is_deleted_before_it_was_loaded_tells_nothing_of_the_engine(gone: PinError) -> None:
    bench = Bench([PinError.CANARY] * 3)
    bench.loads, bench.refusal = [], gone
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.fleet, "send", bench.answer)
        assert asyncio.run(asyncio.wait_for(bench.verdict(), 60)) is Verdict.SUSPECT


@pytest.mark.parametrize("error", [PinError.DIED, PinError.TIMEOUT, PinError.UNAVAILABLE])
def test_what_engines_do_by_themselves_must_come_after_two_proofs(error: PinError) -> None:
    assert verdict_of(error, error, error, FINE)[0] is Verdict.PROVEN
    assert verdict_of(error, error, error, error) == (Verdict.SNAPSHOT, ["new", "new", *PROOF, *PROOF], 0)


@pytest.mark.parametrize("last", [PinError.DIED, PinError.CANARY])
def test_an_engine_whose_replica_is_gone_by_the_verdict_tells_nothing_of_the_snapshot(last: PinError) -> None:
    seen = (last, last, PinError.DIED, PinError.DIED) if last is PinError.DIED else (last, last, last)
    assert verdict_of(*seen)[0] is Verdict.SNAPSHOT
    assert verdict_of(*seen, lost=True)[0] is Verdict.ENGINE


@pytest.mark.parametrize("fault", [OSError(116, "stale file handle"), PermissionError(13, "no"), None])
def test_a_good_snapshot_whose_storage_errs_or_hangs_is_not_there_and_holds_up_no_pin(fault: OSError | None) -> None:
    seen = [PinError.CANARY] * 3
    bench, hangs = Bench(list(seen)), threading.Event()

    def there(_snapshot: str, _digest: str) -> bool:
        if fault is not None:
            raise fault
        return hangs.wait(60)

    bench.pinner.there = there
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.fleet, "send", bench.answer)
        patch.setattr(pinning, "THERE_S", 0.05)
        verdict = asyncio.run(asyncio.wait_for(bench.verdict(), 50))
    hangs.set()
    assert (verdict, bench.asked) == (Verdict.SUSPECT, ["new", "new", "restart", "new"])


def test_good_snapshots_are_looked_for_side_by_side_so_that_storage_that_hangs_is_waited_for_once() -> None:
    bench, both = Bench([PinError.CANARY] * 3), threading.Barrier(2)
    bench.goods = [order_of("good"), order_of("older")]
    bench.pinner.there = lambda _snapshot, digest: both.wait(8) >= 0 and digest == "older"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.fleet, "send", bench.answer)
        verdict = asyncio.run(asyncio.wait_for(bench.verdict(), 50))
    assert (verdict, bench.asked) == (Verdict.SNAPSHOT, ["new", "new", "restart", "older", "new"])


@pytest.mark.parametrize("third", [PinError.CANARY, PinError.REFUSED, PinError.UNAVAILABLE, PinError.UNCHANGED])
def test_failures_that_differ_from_try_to_try_are_the_engines_until_one_comes_again(third: PinError) -> None:
    """Each time something else went wrong: a sound snapshot must not end with it."""
    assert verdict_of(PinError.DIED, PinError.TIMEOUT, third, FINE)[0] is Verdict.PROVEN
    assert verdict_of(third, PinError.DIED, third, third)[2] == (1 if third is not PinError.UNAVAILABLE else 0)


def test_where_no_failure_came_twice_an_engine_alone_does_not_tell_that_the_snapshot_is_to_blame() -> None:
    seen = (PinError.DIED, PinError.TIMEOUT, PinError.CANARY, PinError.REFUSED)
    assert verdict_of(*seen) == (Verdict.SUSPECT, ["new", "new", *PROOF, *PROOF], 0)


# What faults of the chaos kit do to a pin; one that ends with the engine's process fails both tries or one proof.
FAILS_AS = {
    FaultKind.REFUSE_UPDATE: (PinError.REFUSED,),
    FaultKind.WRONG_WEIGHTS: (PinError.UNCHANGED, PinError.CANARY),
    FaultKind.STALE_LABEL: (PinError.LABEL,),
    FaultKind.UNAVAILABLE: (PinError.UNAVAILABLE,),
    FaultKind.HANG: (PinError.TIMEOUT,),
    FaultKind.SLOW_GENERATION: (PinError.TIMEOUT,),
    FaultKind.STOP_ENGINE: (PinError.TIMEOUT,),
    FaultKind.STOP_REPLICA: (PinError.DIED,),
    FaultKind.DIE_ON_UPDATE: (PinError.DIED,),
    FaultKind.KILL_ENGINE: (PinError.DIED,),
    FaultKind.KILL_SUPERVISOR: (PinError.DIED,),
}
BOOTS = ((0, 1), (2,), (3,))  # of two tries and two proofs


def test_as_many_faults_as_an_engine_is_given_within_an_attempt_blame_no_sound_snapshot() -> None:
    assert set(FAILS_AS) == SPOILS_PINS
    seen = {
        tuple(errors)
        for kinds in product(FAILS_AS, repeat=MOST)
        if len(set(kinds)) == MOST or not TWICE_LOOKS_BAD.intersection(kinds)
        for boots in product(BOOTS, repeat=MOST)
        for errors in _spoiled(kinds, boots)
    }
    blamed = {errors for errors in seen if verdict_of(*errors)[0] in (Verdict.SNAPSHOT, Verdict.SUSPECT)}
    assert not blamed
    assert len(seen) > 100


def _spoiled(kinds: tuple[FaultKind, ...], boots: tuple[tuple[int, ...], ...]) -> list[list[PinError | None]]:
    """What two tries and two proofs come to, where each kind spoils what it meets in one boot."""
    causes = [
        [FINE, *(e for k, b in zip(kinds, boots, strict=True) if slot in b for e in FAILS_AS[k])] for slot in range(4)
    ]
    return [list(errors) for errors in product(*causes)]


@pytest.mark.parametrize(
    "errors",
    [
        (PinError.REFUSED, PinError.REFUSED, PinError.REFUSED),  # one kind twice, before and after a start
        (PinError.REFUSED, PinError.DIED, PinError.UNAVAILABLE, PinError.TIMEOUT),  # three kinds, on three boots
    ],
)
def test_one_fault_more_could_blame_it(errors: tuple[PinError, ...]) -> None:
    assert verdict_of(*errors)[0] in (Verdict.SNAPSHOT, Verdict.SUSPECT)
