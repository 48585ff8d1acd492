"""`evalfleet chaos`, from the list of faults to the verdict."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval_service.chaos.evidence import Evidence
from eval_service.chaos.faults import BY_TRAINER, TO_THE_PROXY, Fault, FaultKind, plan_faults
from eval_service.chaos.fleet import Fleet, Say, started
from eval_service.chaos.inject import Done, Injector
from eval_service.chaos.promises import Promise, check_promises, recoveries, told, unexplained
from eval_service.chaos.watch import Outage, wait_until
from eval_service.chaos.world import RUNS, World, build
from eval_service.scratch import Kind, collect, scratch

LEAST_STEPS = 4
_TRAINERS_S = 240.0
_ANSWERED_S = 60.0
_PACE_S = 1.6
_TRAINER_PACE_S = 1.2


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


def run_chaos(options: ChaosOptions) -> int:
    """Run it, print the verdict; 0 when every promise was kept."""
    say = teller()
    faults = plan_faults(options.seed, options.faults, runs=options.runs, kinds=options.kinds)
    began = time.monotonic()
    with workspace(options.out, options.engines) as world:
        with started(world, options.engines, RUNS[: options.runs], say) as fleet:
            done = _afflict(fleet, options, faults, say)
            evidence = fleet.end(done, faults, say)
        promises = check_promises(evidence)
        _print(options, evidence, done, promises, time.monotonic() - began)
        (world.out / "chaos.json").write_text(json.dumps(_document(options, evidence, done, promises), indent=1))
    return 0 if all(promise.kept for promise in promises) else 1


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
        "longest_outage_s": round(_longest(evidence.seen.outages), 2),
        "longest_unexplained_outage_s": round(_longest(unexplained(evidence)), 2),
        "longest_silence_s": round(max((until - since for since, until in evidence.seen.silences), default=0.0), 2),
        "longest_recovery_s": round(max((one.took_s for one in recoveries(evidence)), default=0.0), 2),
        "longest_idle_beside_work_s": round(evidence.seen.idleness.longest_s, 2),
        "promises": [{"name": one.name, "ok": one.kept, "broken": list(one.broken)} for one in promises],
        "list": [asdict(one.fault) | {"landed": one.landed, "detail": one.detail} for one in done],
    }


def _longest(outages: Iterable[Outage]) -> float:
    return max((outage.lasted_s for outage in outages), default=0.0)


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


def teller() -> Say:
    """Tells progress on standard error, with the seconds since now."""
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {line}", file=sys.stderr, flush=True)

    return say


@contextmanager
def workspace(out: Path | None, engines: int) -> Iterator[World]:
    """The named directory, which stays, or a temporary one, which goes."""
    if out is not None:
        yield build(out, engines=engines)
        return
    collect()
    with scratch(Kind.CHAOS) as place:
        yield build(place, engines=engines)
