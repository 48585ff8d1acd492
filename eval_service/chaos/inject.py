"""Does the faults to the service, a few at a time, and sees each of them land.

A fault that did not land (its victim had died, a knob was never felt) is tried again on another victim. Which engine a
fault may spoil now is chaos/sparing.py's to say: it takes another one, or waits in turn.
"""

from __future__ import annotations

import resource
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

import psutil

from eval_service.chaos.faults import KNOBS, SPOILS_PINS, Fault, FaultKind
from eval_service.chaos.knobs import Knob
from eval_service.chaos.records import Records
from eval_service.chaos.service import Service
from eval_service.chaos.sparing import Sparing, Spoiling
from eval_service.chaos.victims import Part, Victims, alive, holders, replica_of
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
    _ended: dict[int, threading.Event] = field(default_factory=lambda: defaultdict(threading.Event))  # by its number
    _sparing: Sparing = field(init=False)

    def __post_init__(self) -> None:
        self._sparing = Sparing(self._open_attempts)

    def _open_attempts(self) -> frozenset[tuple[str, int]] | None:
        return self.records.open_attempts()

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
            self._ended[fault.number] = threading.Event()
            try:
                landed, detail = self._do(other)
            except Exception as exc:  # noqa: BLE001 - a task's edge: told, and tried again
                detail = f"{type(exc).__name__}: {exc}"
            finally:
                self._ended[fault.number].set()
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
        chosen: list[psutil.Process] = []

        def look() -> bool:
            stopped = list(self.victims.stopped)
            found = [process for process in self.victims.find(part) if process not in stopped]
            if to_replace:
                able = self.service.started()
                if part is Part.CONTROLLER:
                    able &= holders(self.service.world.lock)
                found = [process for process in found if process.pid in able]
            first = int(fault.pick * len(found))
            in_turn = (process for process in found[first:] + found[:first] if self._may_hit(fault, process))
            chosen[:] = islice(in_turn, 1)
            return bool(chosen)

        wait_until(look, _SUCCESSOR_S)
        return chosen[0] if chosen else None

    def _may_hit(self, fault: Fault, process: psutil.Process) -> bool:
        """Whether a process may be killed or stopped now, by this try at the fault, with which it is over."""
        return self._may_spoil(fault, process, self._ended[fault.number].is_set, lambda: True)

    def _may_spoil(
        self, fault: Fault, process: psutil.Process, over: Callable[[], bool], felt: Callable[[], bool]
    ) -> bool:
        if fault.kind not in SPOILS_PINS:
            return True
        replica = replica_of(process)
        return replica is not None and self._sparing.grant(Spoiling(fault.kind, replica, over, felt))

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
        """Every engine that may be is told; the victim is who feels it first; then it is off for the others.

        Meanwhile it counts for all of them, so two that nobody feels hold up what would spoil a pin, for so long.
        """
        told: list[Knob] = []

        def tell() -> bool:
            knobs = [Knob(self.service.world.orders, process, fault) for process in self.victims.find(Part.ENGINE)]
            told.extend(one for one in knobs if self._may_spoil(fault, one.process, one.over, one.bitten))
            for knob in told:
                knob.on()
            return bool(told)

        felt: list[Knob] = []
        try:
            if not wait_until(tell, _SUCCESSOR_S):
                return False, "no engine"
            wait_until(lambda: any(knob.bitten() for knob in told), _FELT_S)
            felt = [knob for knob in told if knob.bitten()]
        finally:
            for knob in told:
                if knob not in felt:
                    knob.off()
        pids = ", ".join(str(knob.process.pid) for knob in felt)
        return bool(felt), f"pid {pids}, {fault.times} times" if felt else "no engine felt it"

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
