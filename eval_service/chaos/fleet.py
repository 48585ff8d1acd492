"""All that runs in a chaos run or a soak: how it comes to its end, and what is then to be seen of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from eval_service.chaos.evidence import Evidence, digests_of, kept_in, read_all_samples, scraps_in, to_keep
from eval_service.chaos.faults import Fault
from eval_service.chaos.inject import Done
from eval_service.chaos.patron import Patron
from eval_service.chaos.records import Records
from eval_service.chaos.service import DISABLE, Service
from eval_service.chaos.trainers import Trainers
from eval_service.chaos.victims import Part, Victims, pids
from eval_service.chaos.watch import Seen, Watch, wait_until
from eval_service.chaos.world import World, known_prompts
from eval_service.contract.client import EvalClient
from eval_service.contract.errors import EvalfleetError
from eval_service.contract.wire import EngineView, RunSpec
from eval_service.demo.processes import Family, terminable
from eval_service.demo.service import free_port
from eval_service.scratch import Kind, Scratch

_SETTLE_S = 90.0
_ANSWER_S = 30.0

Say = Callable[[str], None]


@dataclass(slots=True)
class Fleet:
    """The parts, and what could not be drained."""

    world: World
    service: Service
    victims: Victims
    client: EvalClient
    records: Records
    watch: Watch
    trainers: Trainers
    patron: Patron
    undrained: list[str] = field(default_factory=list)

    def end(self, done: Sequence[Done], faults: Sequence[Fault], say: Say) -> Evidence:
        """Drain, stop the service, and gather what is to be seen."""
        seen, strays = self._settle(say)
        orphans, pinned = [*self.service.orphans, *strays], self._pinned()
        self.records.close()
        self.service.keep_ray_logs()
        say("stopping the service")
        orphans += [f"{name} had to be killed" for name in self.service.stop()]
        return self._evidence(done, faults, seen, orphans, pinned)

    def _settle(self, say: Say) -> tuple[Seen, list[str]]:
        """Drain every run, and wait for reservations to expire and for what is left over to be collected; what is left
        of the engines all the same."""
        self.victims.release()
        for run in self.trainers.runs:
            self.drain(run)
        say("drained; waiting for the last reservations and for what is left over")
        seen = self.watch.end()
        wait_until(lambda: not self.records.open_points(), 60.0)
        # With a part of the service switched off nothing may ever come of that.
        wait_until(lambda: not self._scraps() and self._kept_enough(), 5.0 if os.environ.get(DISABLE) else 90.0)
        strays: list[str] = []

        def none() -> bool:
            strays[:] = self._strays()
            return not strays

        wait_until(none, 60.0)
        return seen, strays

    def drain(self, run: str) -> None:
        """Drain one run, and note what keeps it from being drained."""
        try:
            receipt = self.client.drain(run, timeout_s=_SETTLE_S)
        except EvalfleetError as exc:
            self.undrained.append(f"{run} could not be drained: {exc}")
            return
        if not receipt.drained:
            lines = [f"{point.step} {point.suite} {point.reason}" for point in receipt.pending]
            self.undrained.append(f"{run} was not drained within {_SETTLE_S:.0f} s: {'; '.join(lines)}")

    def _pinned(self) -> frozenset[str]:
        """Digests of what engines hold."""
        return frozenset(view.snapshot for view in self._views() if view.snapshot is not None)

    def _views(self) -> list[EngineView]:
        """The engines; a service that does not answer is asked again, for it says nothing of them."""
        found: list[EngineView] = []

        def look() -> bool:
            found[:] = self.service.views(self.client)
            return bool(found)

        wait_until(look, _ANSWER_S)
        return found

    def _strays(self) -> list[str]:
        """Engines and supervisors that belong to no engine of the fleet."""
        views = self._views()
        known = {view.server_pid for view in views} | {view.supervisor_pid for view in views}
        found = pids([*self.victims.find(Part.ENGINE), *self.victims.find(Part.SUPERVISOR)])
        return [f"process {pid} belongs to no engine" for pid in sorted(found - known)]

    def _evidence(
        self,
        done: Sequence[Done],
        faults: Sequence[Fault],
        seen: Seen,
        orphans: Sequence[str],
        pinned: frozenset[str],
    ) -> Evidence:
        """Everything, once the service has ended."""
        records = Records(self.world.ledger)
        ledger = records.everything()
        records.close()
        runs = self.trainers.runs
        diaries = {run: self.trainers.diary(run).read() for run in runs}
        landed = {one.fault.number for one in done if one.landed}
        landed |= {entry["fault"] for diary in diaries.values() for entry in diary if entry["event"] == "landed"}
        return Evidence(
            world=self.world,
            ledger=ledger,
            diaries=diaries,
            samples=read_all_samples(ledger.points),
            kept={run: kept_in(self.world, run) for run in runs},
            pinned=pinned,
            scraps=self._scraps(),
            faults=done,
            seen=seen,
            served=self.patron.told,
            unplanned=[f"#{fault.number} {fault.kind} never landed" for fault in faults if fault.number not in landed],
            orphans=orphans,
            undrained=[*self.undrained, *_undrained(diaries)],
            trainer_failures=self.trainers.failures,
        )

    def _scraps(self) -> list[str]:
        return [path for run in self.trainers.runs for path in scraps_in(self.world, run)]

    def _kept_enough(self) -> bool:
        ledger, spec = self.records.everything(), self.world.run_spec
        pinned = {digest[:8] for digest in self._pinned()}

        def enough(run: str) -> bool:
            more = set(kept_in(self.world, run)) - to_keep(ledger, run, spec(run).keep)
            return set(digests_of(more).values()) <= pinned

        return all(enough(run) for run in self.trainers.runs)


@contextmanager
def started(world: World, engines: int, runs: Sequence[str], say: Say) -> Iterator[Fleet]:
    """The service with so many engines at least, and all that watches it; whatever happens, everything is ended."""
    family, temp = Family(), Scratch.make(Kind.CHAOS_TEMP)
    victims = Victims(family)
    service = Service(world, victims, free_port(), engines, temp.path)
    watch = Watch(world.ledger, service.url, RunSpec(root=str(world.root), suites=("side",), max_in_flight=1_000_000))
    trainers = Trainers(world, family, runs, say)
    try:
        with terminable(), EvalClient(service.url, timeout_s=5.0) as client:
            say(f"starting the service and {engines} engines on port {service.port}")
            service.start(client)
            records = Records(world.ledger)
            patron = Patron(service.url, records, known_prompts(world))
            yield Fleet(world, service, victims, client, records, watch, trainers, patron)
    finally:
        trainers.abandon()  # before they are ended: also where the kit itself was interrupted
        watch.end()
        victims.release()
        family.end(grace_s=1.0, linger_s=1.0)
        service.keep_ray_logs()
        temp.remove()


def _undrained(diaries: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    for run, diary in diaries.items():
        for entry in diary:
            if entry["event"] == "undrained" or (entry["event"] == "drained" and not entry["drained"]):
                yield f"the trainer of {run} could not drain: {entry.get('detail') or entry.get('pending')}"
