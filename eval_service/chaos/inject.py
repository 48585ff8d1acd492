"""Does the faults to the service, a few at a time, and sees each of them land.

A fault that did not land (its victim had died, a knob was never felt) is tried again on another victim.
"""

from __future__ import annotations

import json
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

import psutil

from eval_service.chaos.faults import KNOBS, Fault, FaultKind
from eval_service.chaos.records import Records
from eval_service.chaos.service import Service
from eval_service.chaos.victims import Part, Victims, alive, holders
from eval_service.chaos.watch import wait_until
from eval_service.contract.client import EvalClient

AT_ONCE = 4
TRIES = 2
PASSES = 3
_FELT_S = 10.0
_REPLACED_S = 60.0
_SUCCESSOR_S = 60.0
_LEAST_BYTES = 1
_PROXY_S = 4.0  # with the least that a fault holds: longer than its lease

_KILLS = {
    FaultKind.KILL_CONTROLLER: Part.CONTROLLER,
    FaultKind.KILL_GATEWAY: Part.GATEWAY,
    FaultKind.KILL_PROXY: Part.PROXY,
    FaultKind.KILL_ENGINE: Part.ENGINE,
    FaultKind.KILL_SUPERVISOR: Part.SUPERVISOR,
    FaultKind.KILL_REPLICA: Part.REPLICA,
}
_STOPS = {
    FaultKind.STOP_CONTROLLER: Part.CONTROLLER,
    FaultKind.STOP_GATEWAY: Part.GATEWAY,
    FaultKind.STOP_PROXY: Part.PROXY,
    FaultKind.STOP_ENGINE: Part.ENGINE,
    FaultKind.STOP_SUPERVISOR: Part.SUPERVISOR,
    FaultKind.STOP_REPLICA: Part.REPLICA,
}


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a fault."""

    fault: Fault
    landed: bool
    began_at: float  # Unix seconds
    ended_at: float
    detail: str


@dataclass(slots=True)
class Injector:
    """One thread a fault, `AT_ONCE` at most."""

    service: Service
    victims: Victims
    records: Records
    client: EvalClient
    say: Callable[[str], None]
    pace_s: float
    done: list[Done] = field(default_factory=list)
    _alone: threading.Lock = field(default_factory=threading.Lock)
    _controller: threading.Lock = field(default_factory=threading.Lock)

    def run(self, faults: list[Fault]) -> None:
        """Do all of them; what did not land is done again after the rest, when there is work again for it to spoil."""
        for _ in range(PASSES):
            self._pass(faults)
            missed = [one for one in self.done if not one.landed]
            faults = [one.fault for one in missed]
            if not faults:
                return
            self.done = [one for one in self.done if one.landed]
        self.done += missed

    def _pass(self, faults: list[Fault]) -> None:
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="fault") as pool:
            for fault in faults:
                pool.submit(self._guarded, fault)
                time.sleep(self.pace_s * (0.5 + fault.variant))

    def _guarded(self, fault: Fault) -> None:
        began_at = time.time()
        landed, detail = False, ""
        for number in range(TRIES):
            other = replace(fault, pick=(fault.pick + number / TRIES) % 1.0)
            try:
                landed, detail = self._do(other)
            except Exception as exc:  # noqa: BLE001 - a task's edge: told, and tried again
                detail = f"{type(exc).__name__}: {exc}"
            if landed:
                break
        self.done.append(Done(fault, landed, began_at, time.time(), detail))
        self.say(f"{'landed' if landed else 'did not land'}  #{fault.number} {fault.kind}  {detail}")

    def _do(self, fault: Fault) -> tuple[bool, str]:
        if fault.kind in _KILLS:
            return self._kill(fault, _KILLS[fault.kind])
        if fault.kind in (FaultKind.STOP_CONTROLLER, FaultKind.LOSE_LOCK):
            with self._controller:
                stop = self._stop if fault.kind is FaultKind.STOP_CONTROLLER else self._lose_lock
                return stop(fault, Part.CONTROLLER)
        if fault.kind in _STOPS:
            return self._stop(fault, _STOPS[fault.kind])
        if fault.kind in KNOBS:
            return self._turn(fault)
        if fault.kind is FaultKind.SERVICE_DISK_FULL:
            return self._fill_disk(fault)
        with self._alone:
            return self.service.kill(self.client), "the whole service, started again"

    def _victim(self, fault: Fault, part: Part, *, to_replace: bool = False) -> psutil.Process | None:
        """One of a part. `to_replace`: one that Serve will replace, and of controllers the one that has the lock."""
        found: list[psutil.Process] = []

        def look() -> bool:
            stopped = list(self.victims.stopped)
            found[:] = [process for process in self.victims.find(part) if process not in stopped]
            if to_replace:
                able = self.service.started()
                if part is Part.CONTROLLER:
                    able &= holders(self.service.world.lock)
                found[:] = [process for process in found if process.pid in able]
            return bool(found)

        wait_until(look, _SUCCESSOR_S)
        return found[int(fault.pick * len(found))] if found else None

    def _kill(self, fault: Fault, part: Part) -> tuple[bool, str]:
        victim = self._victim(fault, part)
        if victim is None:
            return False, f"no {part.name.lower()} to kill"
        return self.victims.kill(victim), f"pid {victim.pid}"

    def _stop(self, fault: Fault, part: Part) -> tuple[bool, str]:
        victim = self._victim(fault, part, to_replace=fault.hold_s is None)
        if victim is None or not self.victims.stop(victim):
            return False, f"no {part.name.lower()} was stopped"
        if fault.hold_s is not None:
            hold_s = fault.hold_s + (_PROXY_S if part is Part.PROXY else 0.0)
            time.sleep(hold_s)
            self.victims.go_on(victim)
            return True, f"pid {victim.pid} for {hold_s:.2f} s"
        began = time.monotonic()
        gone = wait_until(lambda: not alive(victim), _REPLACED_S)
        self.victims.go_on(victim)
        took = time.monotonic() - began
        return True, f"pid {victim.pid}, {'ended' if gone else 'NOT ENDED'} after {took:.1f} s"

    def _lose_lock(self, fault: Fault, part: Part) -> tuple[bool, str]:
        """The old controller goes on while the next one acts: only the epoch stands between them."""
        victim, before = self._victim(fault, part, to_replace=True), self.records.acting()
        if victim is None or before is None or not self.victims.stop(victim):
            return False, "no controller was stopped"
        self.service.world.lock.unlink(missing_ok=True)

        def replaced() -> bool:
            acting = self.records.acting()
            return (acting is not None and acting.shown > before.epoch) or not alive(victim)

        wait_until(replaced, _SUCCESSOR_S)
        both = alive(victim) and (self.records.acting() or before).shown > before.epoch
        self.victims.go_on(victim)
        time.sleep(3.0)
        return both, f"pid {victim.pid} of epoch {before.epoch} went on beside its successor"

    # --- knobs

    def _turn(self, fault: Fault) -> tuple[bool, str]:
        """Every engine is told; the first one that feels it is the victim, and the others are told that it is off."""
        if self._victim(fault, Part.ENGINE) is None:
            return False, "no engine"
        knob, value = _knob(fault)
        before = {process.pid: self._felt(process.pid, knob) for process in self.victims.find(Part.ENGINE)}
        for pid in before:
            self._order(fault, pid, knob=knob, value=value, times=fault.times)
        felt: list[int] = []

        def look() -> bool:
            felt[:] = [pid for pid, count in before.items() if self._felt(pid, knob) > count]
            return bool(felt)

        wait_until(look, _FELT_S)
        for pid in before.keys() - set(felt):
            self._order(fault, pid, knob=knob, value=value, times=0)
        return bool(felt), f"pid {', '.join(map(str, felt))}, {fault.times} times" if felt else "no engine felt it"

    def _order(self, fault: Fault, pid: int, **order: object) -> None:
        path = self.service.world.orders / f"{pid}-{fault.number}.json"
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(order))
        beside.replace(path)

    def _felt(self, pid: int, knob: str) -> int:
        try:
            return (self.service.world.orders / f"{pid}.felt").read_text().split().count(knob)
        except FileNotFoundError:
            return 0

    # --- the service's own disk

    def _fill_disk(self, fault: Fault) -> tuple[bool, str]:
        """No file of the controller or a gateway can grow: what the kernel says of a full disk, with another errno."""
        victims = [*self.victims.find(Part.CONTROLLER), *self.victims.find(Part.GATEWAY)]
        if not victims:
            return False, "neither a controller nor a gateway was there"
        before = self.records.acting()
        hold_s = (fault.hold_s or 1.0) + 1.5
        for victim in victims:
            _limit(victim, _LEAST_BYTES)
        time.sleep(hold_s)
        after = self.records.acting()
        for victim in victims:
            _limit(victim, resource.RLIM_INFINITY)
        silent = before is not None and after is not None and after.shown_at - before.shown_at < hold_s - 0.5
        return silent, f"pids {', '.join(str(victim.pid) for victim in victims)} for {hold_s:.1f} s"


def _limit(process: psutil.Process, size: int) -> None:
    with suppress(psutil.Error):
        _, hard = process.rlimit(resource.RLIMIT_FSIZE)
        process.rlimit(resource.RLIMIT_FSIZE, (size, hard))


def _knob(fault: Fault) -> tuple[str, bool | float]:
    if fault.kind is FaultKind.SLOW_GENERATION:
        return "latency_s", round(2.0 + 4.0 * fault.variant, 2)
    return fault.kind.value, True
