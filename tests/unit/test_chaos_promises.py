"""Each promise tells when it is broken: a run without fault, and then one thing wrong at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval_service.chaos.evidence import Evidence, to_keep
from eval_service.chaos.faults import Fault, FaultKind
from eval_service.chaos.idleness import Idleness
from eval_service.chaos.inject import Done
from eval_service.chaos.patron import Answer, Told
from eval_service.chaos.promises import PROMISES, RECOVERY_S, Promise, check_promises, told
from eval_service.chaos.records import Everything
from eval_service.chaos.snapshots import Flaw
from eval_service.chaos.watch import Outage, Seen
from eval_service.chaos.world import SUITES, World
from eval_service.engine.fake import fake_text
from tests.support.views import sample

DIGEST = "d" * 32
RUN, STEP, UUID = "alpha", 3, "u" * 32
FOLDER = "step_3-dddddddd"


def point(suite: str, **changes: Any) -> dict[str, Any]:
    """A done point of the one snapshot."""
    row = {
        "id": f"p-{suite}",
        "run": RUN,
        "step": STEP,
        "suite": suite,
        "reservation": UUID,
        "state": "done",
        "reason": None,
        "detail": None,
        "superseded": False,
        "force": False,
        "snapshot_id": "s1",
        "weight_version": "v1",
        "score": 1 / SUITES[suite],
        "samples_path": "x",
    }
    return row | changes


def attempt(suite: str, number: int = 1, **changes: Any) -> dict[str, Any]:
    """One that ended well."""
    row = {"point": f"p-{suite}", "number": number, "epoch": 1, "started_at": 1.0, "ended_at": 2.0, "outcome": "done"}
    return row | changes


def snapshot(**changes: Any) -> dict[str, Any]:
    """The one snapshot."""
    row = {"id": "s1", "run": RUN, "step": STEP, "path": f"/r/alpha/{FOLDER}", "admitted_at": 1.0, "settled_at": 2.0}
    return row | {"deleted_at": None, "digest": DIGEST} | changes


def diary(flaw: str | None = None, kind: str | None = None) -> list[dict[str, Any]]:
    """What the trainer tells of it: it knows one answer of each suite."""
    return [
        {"event": "begun", "reservation": UUID, "step": STEP, "version": 0, "kind": kind, "variant": 0.0},
        {"event": "reserved", "reservation": UUID, "outcome": "granted"},
        {
            "event": "publishing",
            "reservation": UUID,
            "flaw": flaw,
            "tensor_digest": DIGEST,
            "answers": {"main 0": "m0", "side 0": "s0"},
        },
        {"event": "published", "reservation": UUID, "path": f"/r/alpha/{FOLDER}"},
    ]


def samples(suite: str, **changes: Any) -> list[Any]:
    """Right ones, the first a known answer."""
    prompts = [f"{suite} {number}" for number in range(SUITES[suite])]
    outputs = [f"{suite[0]}0", *(fake_text(DIGEST, prompt) for prompt in prompts[1:])]
    found = [
        sample(number, prompt=prompt, output=output, weight_version="v1")
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    return [found[0].model_copy(update=changes), *found[1:]]


@pytest.fixture
def sound() -> Evidence:
    return Evidence(
        world=World(Path("/w")),
        ledger=Everything(tuple(map(point, SUITES)), tuple(map(attempt, SUITES)), (snapshot(),)),
        diaries={RUN: diary()},
        samples={f"p-{suite}": samples(suite) for suite in SUITES},
        kept={RUN: [FOLDER]},
        pinned=frozenset(),
        scraps=[],
        faults=[],
        seen=Seen(probes=3),
    )


def broken(evidence: Evidence) -> set[str]:
    return {promise.name for promise in check_promises(evidence) if not promise.kept}


def points(evidence: Evidence, **changes: Any) -> Evidence:
    """The same with the first suite's point changed."""
    first, *rest = evidence.ledger.points
    return replace(evidence, ledger=replace(evidence.ledger, points=(first | changes, *rest)))


def attempts(evidence: Evidence, *more: dict[str, Any]) -> Evidence:
    return replace(evidence, ledger=replace(evidence.ledger, attempts=(*evidence.ledger.attempts, *more)))


def with_samples(evidence: Evidence, found: Any) -> Evidence:
    return replace(evidence, samples={**evidence.samples, "p-main": found})


def with_snapshots(evidence: Evidence, *rows: dict[str, Any]) -> Evidence:
    return replace(evidence, ledger=replace(evidence.ledger, snapshots=rows))


def served(evidence: Evidence, text: str, label: str = "dddddddd.s1") -> Evidence:
    return replace(evidence, served=Told([Answer("p-main", "a?", text, label)]))


LOST = "no point is lost"
ENDS = "sound snapshots are done, the others end for their own reason"
DOUBLED = "no result is doubled"
SAMPLES = "every sample and score is of its own snapshot's bytes"
SERVED = "who talks to a point is answered by its own weights"
KEEP = "as many snapshots are kept as the run says"
ONE = "one controller acts"
ORPHANS = "no process and no half-written directory is left"
ANSWERED = "every dispatch is answered"
RECOVERS = "the service recovers in time"
IDLE = "no engine is idle beside a point that may have it, and no point is stuck"

CASES: dict[str, tuple[Callable[[Evidence], Evidence], set[str]]] = {
    "nothing": (lambda e: e, set()),
    "a point is open": (lambda e: points(e, state="running"), {LOST, DOUBLED}),
    "a snapshot has no points": (lambda e: points(e, reservation="other"), {LOST, SAMPLES}),
    "a published one was never taken in": (
        lambda e: replace(
            e, ledger=replace(e.ledger, points=tuple(row | {"snapshot_id": None} for row in e.ledger.points))
        ),
        {LOST},
    ),
    "a trainer could not drain": (lambda e: replace(e, undrained=["alpha"]), {LOST}),
    "a sound one failed": (
        lambda e: points(e, state="failed", reason="max_attempts"),
        {ENDS, DOUBLED},
    ),
    "a sound one was skipped with no reason to": (lambda e: points(e, state="skipped", reason="busy"), {ENDS, DOUBLED}),
    "a bad one was scored": (lambda e: replace(e, diaries={RUN: diary(Flaw.NOT_FINITE)}), {ENDS}),
    "a poisoned one was scored": (lambda e: replace(e, diaries={RUN: diary(Flaw.POISONED)}), {ENDS}),
    "two done attempts": (lambda e: attempts(e, attempt("main", 2, started_at=3.0, ended_at=4.0)), {DOUBLED}),
    "two live attempts": (
        lambda e: attempts(e, attempt("main", 2, started_at=1.5, ended_at=4.0, outcome="engine")),
        {DOUBLED},
    ),
    "an attempt without an end": (
        lambda e: attempts(e, attempt("main", 2, started_at=3.0, ended_at=None, outcome=None)),
        {DOUBLED},
    ),
    "the same point twice": (
        lambda e: replace(
            e,
            ledger=replace(
                e.ledger,
                points=(*e.ledger.points, point("main", id="p-2", state="skipped", reason="busy", superseded=True)),
            ),
        ),
        {DOUBLED},
    ),
    "a sample of other weights": (lambda e: with_samples(e, samples("main", output="other")), {SAMPLES}),
    "a sample under another label": (lambda e: with_samples(e, samples("main", weight_version="v0")), {SAMPLES}),
    "a sample twice": (lambda e: with_samples(e, [*samples("main"), samples("main")[3]]), {SAMPLES}),
    "no samples": (lambda e: with_samples(e, "no such file"), {SAMPLES}),
    "served by its own weights": (lambda e: served(e, fake_text(DIGEST, "a?")), set()),
    "served by other weights": (lambda e: served(e, "other"), {SERVED}),
    "served under another label": (lambda e: served(e, fake_text(DIGEST, "a?"), "eeeeeeee.s1"), {SERVED}),
    "never served again": (lambda e: replace(e, served=Told(silent="503")), {SERVED}),
    "a wrong score": (lambda e: points(e, score=0.5), {SAMPLES}),
    "deleted in use": (
        lambda e: replace(e, seen=Seen(probes=1, deleted_in_use=["/r"])),
        {"no snapshot in use is deleted"},
    ),
    "a kept one is gone": (lambda e: replace(e, kept={RUN: []}), {KEEP}),
    "one too many": (lambda e: replace(e, kept={RUN: [FOLDER, "step_1-aaaaaaaa"]}), {KEEP}),
    "the ledger says deleted": (lambda e: with_snapshots(e, snapshot(deleted_at=3.0)), {KEEP}),
    "an old epoch showed itself": (lambda e: replace(e, seen=Seen(probes=1, old_epochs=["1 after 2"])), {ONE}),
    "an old epoch began an attempt": (
        lambda e: attempts(
            e,
            attempt("side", 2, started_at=3.0, ended_at=4.0, epoch=2, outcome="engine"),
            attempt("side", 3, started_at=5.0, ended_at=6.0, epoch=1, outcome="engine"),
        ),
        {ONE},
    ),
    "a process is left": (lambda e: replace(e, orphans=["pid 1"]), {ORPHANS}),
    "a partial directory is left": (lambda e: replace(e, scraps=[".partial-1"]), {ORPHANS}),
    "nothing was answered": (lambda e: replace(e, seen=Seen()), {ANSWERED}),
    "unanswered for no reason": (
        lambda e: replace(e, seen=Seen(probes=1, outages=[Outage(10.0, 20.0, "refused")])),
        {ANSWERED},
    ),
    "unanswered for too long": (
        lambda e: replace(
            e,
            seen=Seen(probes=1, outages=[Outage(10.0, 11.0 + RECOVERY_S, "refused")]),
            faults=[Done(Fault(0, FaultKind.KILL_GATEWAY, 0, 0.0, 1, None, 0.0), True, 9.0, 10.0, "")],
        ),
        {RECOVERS},
    ),
    "no controller for too long": (
        lambda e: replace(e, seen=Seen(probes=1, silences=[(0.0, RECOVERY_S + 1)])),
        {RECOVERS},
    ),
    "an engine was idle beside a queued point": (
        lambda e: replace(e, seen=Seen(probes=1, idleness=Idleness(told={"e p": "e was idle"}))),
        {IDLE},
    ),
    "a fault never landed": (lambda e: replace(e, unplanned=["#3"]), {"every fault landed"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_promise_is_broken_by_what_breaks_it_and_no_other_is(sound: Evidence, case: str) -> None:
    change, expected = CASES[case]
    assert broken(change(sound)) == expected


def test_every_promise_has_a_case_that_breaks_it() -> None:
    assert {name for _, names in CASES.values() for name in names} == set(PROMISES)


def test_an_unanswered_dispatch_after_a_fault_to_the_api_needs_no_other_reason(sound: Evidence) -> None:
    fault = Fault(0, FaultKind.STOP_GATEWAY, 0, 0.0, 1, None, 0.0)
    seen = Seen(probes=1, outages=[Outage(10.0, 20.0, "refused")])
    assert broken(replace(sound, seen=seen, faults=[Done(fault, True, 9.0, 15.0, "")])) == set()


@pytest.mark.parametrize(("ended_at", "explained"), [(9.5, True), (8.0, False)])
def test_a_stopped_controller_explains_an_unanswered_dispatch_only_while_it_is_stopped(
    sound: Evidence, ended_at: float, explained: bool
) -> None:
    fault = Fault(0, FaultKind.STOP_CONTROLLER, 0, 0.0, 1, None, 0.0)
    seen = Seen(probes=1, outages=[Outage(10.0, 20.0, "the ledger was busy")])
    found = broken(replace(sound, seen=seen, faults=[Done(fault, True, 5.0, ended_at, "")]))
    assert found == (set() if explained else {ANSWERED})


def test_a_second_fault_before_the_recovery_from_the_first_starts_the_time_anew(sound: Evidence) -> None:
    kills = [Fault(number, FaultKind.KILL_CONTROLLER, 0, 0.0, 1, None, 0.0) for number in range(2)]
    seen = Seen(probes=1, silences=[(0.0, RECOVERY_S + 20.0)])
    first, second = (Done(kill, True, at, at, "") for kill, at in zip(kills, (0.5, 30.0), strict=True))
    assert broken(replace(sound, seen=seen, faults=[first])) == {RECOVERS}
    assert broken(replace(sound, seen=seen, faults=[first, second])) == set()


def test_the_best_of_each_suite_is_kept_beside_the_last_ones() -> None:
    scores = {"s1": 0.9, "s2": 0.1, "s3": 0.5}
    rows = [
        snapshot(id=name, path=f"/r/alpha/step_{number}-0", settled_at=number + 1.0, step=number)
        for number, name in enumerate(scores)
    ]
    points = [point("main", snapshot_id=name, score=score) for name, score in scores.items()]
    ledger = Everything(tuple(points), (), tuple(rows))
    assert to_keep(ledger, RUN, 1) == {"step_0-0", "step_2-0"}
    assert to_keep(ledger, RUN, 0) == {"step_0-0"}
    assert to_keep(ledger, "beta", 2) == set()


def test_what_an_engine_still_holds_may_be_one_more(sound: Evidence) -> None:
    one_more = replace(sound, kept={RUN: [FOLDER, "step_1-aaaaaaaa"]})
    assert broken(replace(one_more, pinned=frozenset({"a" * 32}))) == set()
    assert broken(replace(one_more, pinned=frozenset({"b" * 32}))) == {KEEP}


def test_a_late_point_of_a_run_that_lets_points_give_way_may_be_busy(sound: Evidence) -> None:
    gave_way = points(sound, run="beta", state="skipped", reason="busy")
    assert ENDS not in broken(gave_way)
    forced = points(sound, run="beta", state="skipped", reason="busy", force=True)
    assert ENDS in broken(forced)


def test_a_long_list_of_breaches_is_cut_and_says_so() -> None:
    lines = told(Promise("x", tuple(str(number) for number in range(9))))
    assert lines == ["0", "1", "2", "3", "4", "and 4 more"]
