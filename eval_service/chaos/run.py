"""`evalfleet chaos`, from the list of faults to the verdict."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eval_service.chaos.evidence import Evidence, digests_of, kept_in, read_all_samples, scraps_in, to_keep
from eval_service.chaos.faults import BY_TRAINER, TO_THE_PROXY, Fault, FaultKind, plan_faults
from eval_service.chaos.inject import Done, Injector
from eval_service.chaos.patron import Patron
from eval_service.chaos.promises import Promise, check_promises, told
from eval_service.chaos.records import Records
from eval_service.chaos.service import Service
from eval_service.chaos.trainers import Trainers
from eval_service.chaos.victims import Part, Victims, pids
from eval_service.chaos.watch import Seen, Watch, wait_until
from eval_service.chaos.world import RUNS, World, build, known_prompts
from eval_service.contract.client import EvalClient
from eval_service.contract.errors import EvalfleetError
from eval_service.contract.wire import RunSpec
from eval_service.demo.processes import Family
from eval_service.demo.service import free_port

LEAST_STEPS = 4
_TRAINERS_S = 240.0
_SETTLE_S = 90.0
_ANSWERED_S = 60.0
_PACE_S = 1.6
_TRAINER_PACE_S = 1.2

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """What the command is asked."""

    seed: int
    faults: int
    out: Path | None
    engines: int = 3
    runs: int = len(RUNS)
    kinds: tuple[FaultKind, ...] = ()
    as_json: bool = False


@dataclass(slots=True)
class Fleet:
    """All that runs."""

    world: World
    service: Service
    victims: Victims
    client: EvalClient
    records: Records
    watch: Watch
    trainers: Trainers
    patron: Patron
    undrained: list[str] = field(default_factory=list)


def run_chaos(options: ChaosOptions) -> int:
    """Run it, print the verdict; 0 when every promise was kept."""
    say = _teller()
    faults = plan_faults(options.seed, options.faults, runs=options.runs, kinds=options.kinds)
    began = time.monotonic()
    with _workspace(options) as world:
        done, evidence = _live_through(options, world, faults, say)
        promises = check_promises(evidence)
        _print(options, evidence, done, promises, time.monotonic() - began)
        (world.out / "chaos.json").write_text(json.dumps(_document(options, evidence, done, promises), indent=1))
    return 0 if all(promise.kept for promise in promises) else 1


def _live_through(
    options: ChaosOptions, world: World, faults: Sequence[Fault], say: Say
) -> tuple[list[Done], Evidence]:
    family, port = Family(), free_port()
    victims, scratch = Victims(family), Path(tempfile.mkdtemp(prefix="ef-"))
    runs = RUNS[: options.runs]
    service = Service(world, victims, port, options.engines, scratch)
    watch = Watch(world.ledger, service.url, RunSpec(root=str(world.root), suites=("side",), max_in_flight=1_000_000))
    trainers = Trainers(world, family, runs, say)
    try:
        with EvalClient(service.url, timeout_s=5.0) as client:
            say(f"starting the service and {options.engines} fake engines on port {port}")
            service.start(client)
            records = Records(world.ledger)
            patron = Patron(service.url, records, known_prompts(world))
            fleet = Fleet(world, service, victims, client, records, watch, trainers, patron)
            done = _afflict(fleet, options, faults, say)
            seen = _settle(fleet, say)
            orphans, pinned = [*service.orphans, *_strays(fleet)], _pinned(fleet)
            fleet.records.close()
        say("stopping the service")
        orphans += [f"{name} had to be killed" for name in service.stop()]
        return done, _evidence(fleet, done, faults, seen, orphans, pinned)
    finally:
        trainers.abandon()  # before they are ended: also where the kit itself was interrupted
        watch.end()
        victims.release()
        family.end(grace_s=1.0, linger_s=1.0)
        shutil.rmtree(scratch, ignore_errors=True)


def _afflict(fleet: Fleet, options: ChaosOptions, faults: Sequence[Fault], say: Say) -> list[Done]:
    ours = [fault for fault in faults if fault.kind not in BY_TRAINER]
    theirs = [fault for fault in faults if fault.kind in BY_TRAINER]
    say(f"{len(faults)} faults: {len(ours)} to the service, {len(theirs)} to trainers and their exports")
    fleet.watch.start()
    fleet.trainers.start(fleet.service.url, options.seed, theirs, least_steps=LEAST_STEPS, pace_s=_TRAINER_PACE_S)
    if any(fault.kind in TO_THE_PROXY for fault in faults):
        fleet.patron.start()
    injector = Injector(fleet.service, fleet.victims, fleet.records, fleet.client, say, _PACE_S)
    injector.run(ours)
    say("no more faults to the service; the trainers come to their end and drain")
    wait_until(fleet.watch.answered, _ANSWERED_S)
    fleet.watch.end_probing()
    if not fleet.trainers.finish(_TRAINERS_S):
        fleet.undrained.append(f"the trainers did not end within {_TRAINERS_S:.0f} s")
    if fleet.patron.started:
        fleet.patron.ask_last()
    return injector.done


def _settle(fleet: Fleet, say: Say) -> Seen:
    """Drain every run, and wait for reservations to expire and for what is left over to be collected."""
    fleet.victims.release()
    for run in fleet.trainers.runs:
        try:
            receipt = fleet.client.drain(run, timeout_s=_SETTLE_S)
        except EvalfleetError as exc:
            fleet.undrained.append(f"{run} could not be drained: {exc}")
            continue
        if not receipt.drained:
            lines = [f"{point.step} {point.suite} {point.reason}" for point in receipt.pending]
            fleet.undrained.append(f"{run} was not drained within {_SETTLE_S:.0f} s: {'; '.join(lines)}")
    say("drained; waiting for the last reservations and for what is left over")
    seen = fleet.watch.end()
    wait_until(lambda: not fleet.records.open_points(), 30.0)
    wait_until(lambda: not _scraps(fleet) and _kept_enough(fleet), 25.0)
    wait_until(lambda: not _strays(fleet), 15.0)
    return seen


def _scraps(fleet: Fleet) -> list[str]:
    return [path for run in fleet.trainers.runs for path in scraps_in(fleet.world, run)]


def _kept_enough(fleet: Fleet) -> bool:
    ledger, spec = fleet.records.everything(), fleet.world.run_spec
    runs = fleet.trainers.runs
    pinned = {digest[:8] for digest in _pinned(fleet)}

    def enough(run: str) -> bool:
        more = set(kept_in(fleet.world, run)) - to_keep(ledger, run, spec(run).keep)
        return set(digests_of(more).values()) <= pinned

    return all(enough(run) for run in runs)


def _pinned(fleet: Fleet) -> frozenset[str]:
    views = fleet.service.views(fleet.client)
    return frozenset(view.snapshot for view in views if view.snapshot is not None)


def _strays(fleet: Fleet) -> list[str]:
    """Engines and supervisors that belong to no engine of the fleet."""
    views = fleet.service.views(fleet.client)
    known = {view.server_pid for view in views} | {view.supervisor_pid for view in views}
    found = pids([*fleet.victims.find(Part.ENGINE), *fleet.victims.find(Part.SUPERVISOR)])
    return [f"process {pid} belongs to no engine" for pid in sorted(found - known)]


def _evidence(
    fleet: Fleet,
    done: Sequence[Done],
    faults: Sequence[Fault],
    seen: Seen,
    orphans: Sequence[str],
    pinned: frozenset[str],
) -> Evidence:
    records = Records(fleet.world.ledger)
    ledger = records.everything()
    records.close()
    runs = fleet.trainers.runs
    diaries = {run: fleet.trainers.diary(run).read() for run in runs}
    landed = {one.fault.number for one in done if one.landed}
    landed |= {entry["fault"] for diary in diaries.values() for entry in diary if entry["event"] == "landed"}
    return Evidence(
        world=fleet.world,
        ledger=ledger,
        diaries=diaries,
        samples=read_all_samples(ledger.points),
        kept={run: kept_in(fleet.world, run) for run in runs},
        pinned=pinned,
        scraps=_scraps(fleet),
        faults=done,
        seen=seen,
        served=fleet.patron.told,
        unplanned=[f"#{fault.number} {fault.kind} never landed" for fault in faults if fault.number not in landed],
        orphans=orphans,
        undrained=[*fleet.undrained, *_undrained(diaries)],
        trainer_failures=fleet.trainers.failures,
    )


def _undrained(diaries: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    for run, diary in diaries.items():
        for entry in diary:
            if entry["event"] == "undrained" or (entry["event"] == "drained" and not entry["drained"]):
                yield f"the trainer of {run} could not drain: {entry.get('detail') or entry.get('pending')}"


# --- what is printed


def counts_by_kind(evidence: Evidence, done: Sequence[Done]) -> dict[str, int]:
    """How many faults of each kind were seen to land."""
    counts = Counter(str(one.fault.kind) for one in done if one.landed)
    for diary in evidence.diaries.values():
        counts.update(entry["kind"] for entry in diary if entry["event"] == "landed")
    return {kind.value: counts[kind.value] for kind in FaultKind if counts[kind.value]}


def _document(
    options: ChaosOptions, evidence: Evidence, done: Sequence[Done], promises: Sequence[Promise]
) -> dict[str, Any]:
    states = Counter(f"{point['state']}:{point['reason'] or ''}".rstrip(":") for point in evidence.ledger.points)
    return {
        "seed": options.seed,
        "faults": options.faults,
        "ok": all(promise.kept for promise in promises),
        "landed": counts_by_kind(evidence, done),
        "points": dict(states),
        "attempts": len(evidence.ledger.attempts),
        "probes": evidence.seen.probes,
        "served_answers": len(evidence.served.answers),
        "served_refusals": evidence.served.refused,
        "slowest_dispatch_s": round(evidence.seen.slowest_s, 3),
        "longest_outage_s": round(max((outage.lasted_s for outage in evidence.seen.outages), default=0.0), 2),
        "longest_silence_s": round(max((until - since for since, until in evidence.seen.silences), default=0.0), 2),
        "longest_idle_beside_work_s": round(evidence.seen.idleness.longest_s, 2),
        "promises": [{"name": one.name, "ok": one.kept, "broken": list(one.broken)} for one in promises],
        "list": [asdict(one.fault) | {"landed": one.landed, "detail": one.detail} for one in done],
    }


def _print(
    options: ChaosOptions, evidence: Evidence, done: Sequence[Done], promises: Sequence[Promise], took_s: float
) -> None:
    document = _document(options, evidence, done, promises)
    if options.as_json:
        print(json.dumps(document, indent=2))
        return
    print(f"\nseed {options.seed}, {options.faults} faults in {took_s:.0f} s. Seen to land:")
    for kind, count in document["landed"].items():
        print(f"  {count:4}  {kind}")
    print("Points:", ", ".join(f"{count} {state}" for state, count in sorted(document["points"].items())))
    for promise in promises:
        print(f"{'pass' if promise.kept else 'FAIL'}  {promise.name}")
        for line in told(promise):
            print(f"      {line}")


def _teller() -> Say:
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {line}", file=sys.stderr, flush=True)

    return say


@contextmanager
def _workspace(options: ChaosOptions) -> Iterator[World]:
    """The named directory, which stays, or a temporary one, which goes."""
    if options.out is not None:
        yield build(options.out, engines=options.engines)
        return
    with tempfile.TemporaryDirectory(prefix="evalfleet-chaos-") as place:
        yield build(Path(place) / "world", engines=options.engines)
