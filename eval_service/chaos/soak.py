"""`python -m eval_service.chaos.soak [--minutes 30] [--seed 0] [--out DIR]`: nothing is lost, and nothing grows.

Six runs train and dispatch, a seventh has a real SGLang engine as its judge; up to eight fake engines come and go at
random; the controller is killed twice. Prints one JSON object; exit 0 where every promise of the chaos kit was kept, no
process of the service grows by more than 1 MB a minute after the first third, and none has more files open at its end.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from eval_service.chaos.evidence import Evidence
from eval_service.chaos.faults import Fault, FaultKind
from eval_service.chaos.fleet import Fleet, Say, started
from eval_service.chaos.inject import Done, Injector
from eval_service.chaos.meter import Growth, Meter
from eval_service.chaos.promises import check_promises
from eval_service.chaos.run import teller, workspace
from eval_service.chaos.victims import Part
from eval_service.chaos.watch import wait_until
from eval_service.chaos.world import SUITES, World
from eval_service.contract.errors import EvalfleetError
from eval_service.contract.states import PointState
from eval_service.contract.wire import DispatchRequest, RunSpec, Source
from eval_service.demo import tiny
from eval_service.fleet_config import EVAL_GROUP

RUNS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
JUDGED = "judged"  # the seventh run, and its suite
ENGINES = 8
KILLED_AT = (1 / 6, 1 / 3)  # of the time: who acts then is watched for the rest of it
MAX_MB_PER_MIN = 1.0
MORE_FILES = 16
_STEP_S = 3.0
_SCALE_S = (20.0, 45.0)
_JUDGED_S = 8.0
_LOOK_S = 5.0
_LEAST_STEPS = 4
_LEAST_LIFE_S = 150.0  # shorter lives show how Python takes memory in, and no leak
_TRAINERS_S = 240.0
_PARTS = {
    "controller": Part.CONTROLLER,
    "gateway": Part.GATEWAY,
    "proxy": Part.PROXY,
    "engine replica": Part.REPLICA,
}

_SUITE = """
[suites.judged]
sampling = { max_new_tokens = 8 }
datasets = [{ name = "side", path = "side.jsonl" }]
[suites.judged.scorer]
name = "judge"
group = "judge"
template = "{prompt} {output}"
verdict = '()'
scores = { "" = 1.0 }
max_new_tokens = 8
timeout_s = 60.0
"""
_JUDGE = """
[groups.judge]
kind = "frozen"
grade = "sglang-cpu"
model = "judge"
num_engines = 1
num_gpus_per_engine = 0
server_concurrency = 8
"""


@dataclass(slots=True)
class Restless:
    """Threads beside the trainers: one asks for other numbers of engines, one for points of the judged run."""

    fleet: Fleet
    seed: int
    say: Say
    scaled: list[int] = field(default_factory=list)
    judged: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    _ending: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Begin."""
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._scale, self._judge)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Ask for nothing more; all engines that there may be, so that what is queued is done."""
        self._ending.set()
        for thread in self._threads:
            thread.join(60.0)
        self._asked(ENGINES)

    def _scale(self) -> None:
        rng = random.Random(self.seed)
        while not self._ending.wait(rng.uniform(*_SCALE_S) if self.scaled else 0.1):
            self._asked(rng.randint(1, ENGINES))

    def _asked(self, engines: int) -> None:
        with suppress(EvalfleetError):  # the gateway may be away; another number comes soon
            self.fleet.client.scale(EVAL_GROUP, engines)
            self.scaled.append(engines)
            self.say(f"{engines} engines are wanted")

    def _judge(self) -> None:
        world, client = self.fleet.world, self.fleet.client
        spec, known = RunSpec(root=str(world.root), suites=(JUDGED,), max_in_flight=1_000_000), False
        while not self._ending.wait(_JUDGED_S):
            request = DispatchRequest(
                run=JUDGED,
                step=len(self.judged),
                suites=(JUDGED,),
                reservation=str(uuid.uuid4()),
                snapshot=str(world.model),
                source=Source.CALLER,
            )
            try:
                if not known:
                    client.put_run(JUDGED, spec)
                    known = True
                self.judged.append(client.dispatch(request).points[0].id)
            except EvalfleetError as exc:
                self.failures.append(f"a dispatch of the judged run was not answered: {exc}")


def soak(minutes: float, seed: int, out: Path | None) -> int:
    """Run it, print the JSON object; 0 where all is well."""
    say, began = teller(), time.monotonic()
    with workspace(out, engines=1) as world:
        _widen(world)
        with started(world, 2, RUNS, say) as fleet:
            restless = Restless(fleet, seed, say)
            meter = Meter(fleet.victims, _PARTS, _LOOK_S)
            done = _live(fleet, restless, meter, 60 * minutes, seed, say)
            fleet.drain(JUDGED)
            evidence = fleet.end(done, [one.fault for one in done], say)
        document = _document(evidence, restless, meter, 60 * minutes, seed)
        document["took_s"] = round(time.monotonic() - began, 1)
        (world.out / "soak.json").write_text(json.dumps(document, indent=1))
    print(json.dumps(document, indent=2))
    return 0 if document["ok"] else 1


def _widen(world: World) -> None:
    """The chaos kit's world, with bounds for its engines, and a real one that judges."""
    tiny.build_model(world.out / "judge")
    fleet, suites = world.out / "fleet.toml", world.out / "suites.toml"
    fleet.write_text(fleet.read_text().replace("num_engines = 1\n", f"num_engines = [1, {ENGINES}]\n") + _JUDGE)
    suites.write_text(suites.read_text() + _SUITE)


def _live(fleet: Fleet, restless: Restless, meter: Meter, lasts_s: float, seed: int, say: Say) -> list[Done]:
    """Everything at once for so long, with the kills in between; then the trainers' end."""
    fleet.watch.start()
    fleet.trainers.start(fleet.service.url, seed, [], least_steps=_LEAST_STEPS, pace_s=_STEP_S)
    meter.start()
    restless.start()
    done: list[Done] = []
    began = time.monotonic()
    for number, share in enumerate(KILLED_AT):
        time.sleep(max(0.0, began + share * lasts_s - time.monotonic()))
        injector = Injector(fleet.service, fleet.victims, fleet.records, fleet.client, say, pace_s=0.1)
        injector.run([Fault(number, FaultKind.KILL_CONTROLLER, 0, 0.0, 1, None, 0.0)])
        done += injector.done
    time.sleep(max(0.0, began + lasts_s - time.monotonic()))
    meter.end()
    say("the trainers come to their end and drain")
    restless.end()
    wait_until(fleet.watch.answered, 60.0)
    fleet.watch.end_probing()
    if not fleet.trainers.finish(_TRAINERS_S):
        fleet.undrained.append(f"the trainers did not end within {_TRAINERS_S:.0f} s")
    return done


def _document(evidence: Evidence, restless: Restless, meter: Meter, lasts_s: float, seed: int) -> dict[str, Any]:
    theirs = [point for point in evidence.ledger.points if point["run"] == JUDGED]
    points = tuple(point for point in evidence.ledger.points if point["run"] != JUDGED)
    promises = check_promises(replace(evidence, ledger=replace(evidence.ledger, points=points)))
    broken = {one.name: list(one.broken) for one in promises if not one.kept}
    if lost := [*restless.failures, *_unjudged(theirs, evidence, restless.judged)]:
        broken["no point of the judged run is lost"] = lost
    grown = meter.grown(warm_at_s=lasts_s / 3, warm_up_s=max(lasts_s / 10, 60.0), least_s=_LEAST_LIFE_S)
    worst = {name: _worst(found) for name, found in grown.items() if found}
    if grows := [f"{name}: {one['mb_per_min']} MB a minute" for name, one in worst.items() if _grows(one)]:
        broken[f"memory grows by {MAX_MB_PER_MIN:.0f} MB a minute at most"] = grows
    if opens := [f"{name}: {one['more_files']} more" for name, one in worst.items() if one["more_files"] > MORE_FILES]:
        broken["no file stays open"] = opens
    states = Counter(f"{point['state']}:{point['reason'] or ''}".rstrip(":") for point in points)
    return {
        "ok": not broken,
        "minutes": lasts_s / 60,
        "seed": seed,
        "runs": len(RUNS) + 1,
        "points": dict(states),
        "judged": len(theirs),
        "scaled": restless.scaled,
        "controller_kills": sum(one.landed for one in evidence.faults),
        "longest_outage_s": round(max((outage.lasted_s for outage in evidence.seen.outages), default=0.0), 2),
        "worst": worst,
        "unmeasured": [name for name in _PARTS if name not in worst],
        "lives": {name: [asdict(one) for one in found] for name, found in grown.items()},
        "broken": broken,
    }


def _unjudged(points: Sequence[dict[str, Any]], evidence: Evidence, asked: Sequence[str]) -> Iterator[str]:
    there = {point["id"]: point for point in points}
    for name in asked:
        point, samples = there.get(name), evidence.samples.get(name, "none")
        if point is None or point["state"] != PointState.DONE:
            yield f"{name} is {point['state'] if point else 'not there'}: {point['detail'] if point else ''}"
        elif isinstance(samples, str) or [sample.error for sample in samples] != [None] * SUITES["side"]:
            yield f"{name} has no sound samples: {samples if isinstance(samples, str) else len(samples)}"


def _worst(found: Sequence[Growth]) -> dict[str, float]:
    return {
        "mb_per_min": max(one.mb_per_min for one in found),
        "more_files": max(one.files_last - one.files_first for one in found),
        "lives": len(found),
    }


def _grows(worst: dict[str, float]) -> bool:
    return worst["mb_per_min"] > MAX_MB_PER_MIN


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="soak", description="Nothing is lost and nothing grows.")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long the trainers train")
    parser.add_argument("--seed", type=int, default=0, help="of the numbers of engines")
    parser.add_argument("--out", type=Path, help="keep the ledger, logs and snapshots here")
    args = parser.parse_args(argv)
    return soak(args.minutes, args.seed, args.out)


if __name__ == "__main__":
    sys.exit(main())
