"""Requests in, whole answers out: named targets, least in flight, replay, ejection. A library; one event loop owns it.

Invariants: every granted slot is given back exactly once; a request is at work on at most one upstream at a time; a 4xx
is an answer and never counts against anybody; a replay is safe only for requests without side effects, which is what
this router is for.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Any, Self

from router.errors import CutShort, DeadlinePassed, NoTarget, NoUpstream, QueueFull, UpstreamFailed, WaitTimeout
from router.exchange import Exchange, Header, Outlet, Reply, Request
from router.faults import Broken, Fault, FaultKind
from router.gate import Gate
from router.limits import Limits
from router.stats import Stats, TargetStats, Totals, UpstreamStats
from router.transport import Transport
from router.upstream import Run, Slots, Upstream, header_lines

_JSON = b"Content-Type: application/json\r\n"
_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer below 500, whole; `body` is empty where it was passed on as it came.

    `attempts` counts runs, `latency_s` is the last one's, without any wait at the gate.
    """

    status: int
    body: bytes
    upstream: str
    attempts: int
    latency_s: float
    headers: list[Header]
    passed_on: bool
    tail: bytes = b""  # header lines that a proxy adds


@dataclass(slots=True)
class _Call:
    """One request of a caller, through all its runs."""

    request: Request
    deadline: float
    outlet: Outlet | None
    faults: list[Fault] = field(default_factory=list)
    attempts: int = 0

    @property
    def excluded(self) -> frozenset[str]:
        return frozenset(fault.upstream for fault in self.faults) if self.faults else _NONE

    @property
    def reached(self) -> int:
        """Faults that the request may have caused: where no connection came about, it can't have."""
        return sum(fault.kind is not FaultKind.CONNECT for fault in self.faults)

    def remaining_s(self, now: float) -> float:
        return max(self.deadline - now, 0.0)


class Router:
    """The data plane. Use it as an async context manager, or call `close`."""

    def __init__(self, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits or Limits()
        self._clock = clock
        self._gates: dict[str, Gate] = {}
        self._slots: dict[str, Slots] = {}
        self._transport: Transport | None = None
        self._closed = False
        self._sequence = count(1)
        self._totals = Totals()
        self._faults: Counter[FaultKind] = Counter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop every target and close every connection; requests in flight end in NoTarget."""
        self._closed = True
        for name in list(self._gates):
            self.drop_target(name, abort=True)
        if self._transport is not None:
            await self._transport.close()

    # --- targets ----------------------------------------------------------------------------------------------------

    def set_target(self, name: str, upstreams: Iterable[Upstream]) -> None:
        """Make a target, or change it to be exactly these upstreams; requests that wait go on waiting. One that it has
        already stays as it is, ejected or not.
        """
        wanted = {upstream.id: upstream for upstream in upstreams}
        gate = self._gates.get(name)
        if gate is None:
            gate = self._gates[name] = Gate(name, self.limits, self._freed, lambda: next(self._sequence))
        for gone in gate.slots.keys() - wanted.keys():
            self.remove(name, gone)
        for upstream in wanted.values():
            if (known := gate.slots.get(upstream.id)) is None or known.upstream != upstream:
                self.add(name, upstream)

    def add(self, name: str, upstream: Upstream) -> None:
        """Give a target one more upstream, which the caller has proven; the same id with another URL replaces it.

        Raises:
            NoTarget: there is none of that name.
        """
        gate = self._gate(name)
        slots = self._slots.setdefault(upstream.id, Slots(upstream))
        if slots.upstream != upstream or not slots.healthy:
            slots.renew(upstream)
        slots.targets.add(name)
        gate.slots[upstream.id] = slots
        self._pump(slots)

    def remove(self, name: str, upstream: str, *, abort: bool = False) -> None:
        """Send no more of this target's requests to an upstream. Those in flight finish; with `abort` they run again
        elsewhere, of whichever target they are. An id that isn't there is no error.

        Raises:
            NoTarget: there is none of that name.
        """
        slots = self._gate(name).slots.pop(upstream, None)
        if slots is None:
            return
        slots.targets.discard(name)
        if abort:
            for run in slots.runs:
                run.abort()
        self._forget_if_idle(slots)

    def drop_target(self, name: str, *, abort: bool = False) -> None:
        """End a target: those who wait get NoTarget, those in flight finish (with `abort` they get NoTarget too)."""
        gate = self._gates.get(name)
        if gate is None:
            return
        for upstream in list(gate.slots):
            self.remove(name, upstream, abort=abort)
        del self._gates[name]
        gate.shut()

    def readmit(self, upstream: str) -> bool:
        """The caller has proven an ejected upstream; False if no target has it."""
        slots = self._slots.get(upstream)
        if slots is None:
            return False
        slots.renew(slots.upstream)
        self._pump(slots)
        return True

    async def vacated(self, upstream: str, timeout_s: float) -> None:
        """Return once everything that is in flight on an upstream now has ended; what is left of it after `timeout_s`
        is aborted, and runs again elsewhere if it can.
        """
        slots = self._slots.get(upstream)
        if slots is None:
            return
        runs = frozenset(slots.runs)
        try:
            async with asyncio.timeout(timeout_s):
                await _ended(slots, runs)
        except TimeoutError:
            for run in runs & slots.runs:
                run.abort()
            await _ended(slots, runs)

    def stats(self) -> Stats:
        """Everything at this moment."""
        return Stats(
            targets={
                name: TargetStats(tuple(gate.slots), gate.in_flight, gate.waiting, gate.capacity, gate.peak)
                for name, gate in self._gates.items()
            },
            upstreams={
                id_: UpstreamStats(slots.in_flight, slots.healthy, slots.granted, slots.answered, slots.faulted)
                for id_, slots in self._slots.items()
            },
            totals=copy(self._totals),
            faults=dict(self._faults),
        )

    # --- requests ---------------------------------------------------------------------------------------------------

    async def post(
        self,
        target: str,
        path: str,
        body: bytes | Mapping[str, Any],
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Run a request on one of the target's upstreams, again on another one after a fault.

        `timeout_s` is the caller's deadline for all of it, waits and replays included; one run is bounded by
        `request_timeout_s` as well. A mapping is sent as JSON. Cancelling the caller's task closes
        the upstream request.

        Raises:
            NoTarget, QueueFull, NoUpstream, WaitTimeout: it was never let in (again).
            UpstreamFailed, DeadlinePassed: it was, and no run gave an answer.
        """
        lines = header_lines(headers) if headers else b""
        if not isinstance(body, bytes):
            body, lines = json.dumps(body).encode(), _JSON + lines
        return await self.forward(target, Request(b"POST", path.encode(), lines, body), timeout_s=timeout_s)

    async def forward(self, target: str, request: Request, *, timeout_s: float, outlet: Outlet | None = None) -> Answer:
        """As `post`, for a request that is made already; an answer that `outlet` doesn't hold is passed on to it as it
        comes, and from its first byte on is not run again.

        Raises:
            CutShort: it broke off after that; what was passed on is not whole. Else as `post`.
        """
        call = _Call(request, self._clock() + timeout_s, outlet)
        try:
            answer = await self._until_answered(target, call)
        except QueueFull:
            self._totals.refused += 1
            raise
        except (NoUpstream, WaitTimeout):
            self._totals.waited_out += 1
            raise
        except UpstreamFailed:
            self._totals.failed += 1
            raise
        except asyncio.CancelledError:
            self._totals.left += 1
            raise
        self._totals.answered += 1
        return answer

    async def _until_answered(self, target: str, call: _Call) -> Answer:
        while True:
            gate = self._gate(target)
            run = gate.take(call.excluded) or await self._admitted(gate, call)
            try:
                answer = await self._run_once(run, call)
            finally:
                gate.release(run)
            if answer is not None:
                return answer
            self._totals.replayed += 1

    async def _admitted(self, gate: Gate, call: _Call) -> Run:
        wait_s = min(self.limits.wait_timeout_s, call.remaining_s(self._clock()))
        try:
            return await gate.admit(wait_s, call.excluded, replay=call.attempts > 0)
        except (NoUpstream, WaitTimeout) as exc:
            if call.faults:
                raise UpstreamFailed(f"no other run after {call.attempts}: {exc}", call.faults) from exc
            raise

    async def _run_once(self, run: Run, call: _Call) -> Answer | None:
        """One run; None means that it is to be run again."""
        call.attempts += 1
        if run.aborted:
            return None
        started = self._clock()
        remaining_s = call.remaining_s(started)
        done = asyncio.get_running_loop().create_future()
        exchange = run.exchange = Exchange(run.upstream.id, done, call.outlet, run.upstream.tail)
        transport = self._transport or self._made_transport()
        reply = await transport.send(
            run.upstream, call.request, exchange, timeout_s=min(self.limits.request_timeout_s, remaining_s)
        )
        if isinstance(reply, Broken) or reply.status >= 500:
            self._judge(run, call, exchange, reply, in_time=remaining_s >= self.limits.request_timeout_s)
            return None
        self._slots_of(run).succeeded(run)
        latency_s = self._clock() - started
        told = (run.upstream.id, call.attempts, latency_s, reply.headers, exchange.passed_on, run.upstream.tail)
        return Answer(reply.status, reply.body, *told)

    def _made_transport(self) -> Transport:
        self._transport = Transport(self.limits.connect_timeout_s)
        return self._transport

    def _judge(self, run: Run, call: _Call, exchange: Exchange, why: Broken | Reply, *, in_time: bool) -> None:
        """A run gave no answer that may be passed on: whose fault is it, and may the request run again?"""
        id_ = run.upstream.id
        blameless = exchange.aborted or (exchange.expired and (not in_time or exchange.outlet_is_slow))
        if not blameless:
            self._record(run, call, _fault_of(run, why))
        if exchange.passed_on:
            raise CutShort(f"the answer of {id_} broke off after some of it was passed on", call.faults)
        if exchange.expired and not in_time:
            raise DeadlinePassed(f"{id_} was at work when the deadline came", call.faults)
        if call.reached >= self.limits.max_faults:
            raise UpstreamFailed(f"no answer in {call.attempts} runs", call.faults)

    def _record(self, run: Run, call: _Call, fault: Fault) -> None:
        call.faults.append(fault)
        self._faults[fault.kind] += 1
        if self._slots_of(run).failed(run, self.limits.eject_after):
            self._totals.ejections += 1

    # --- slots ------------------------------------------------------------------------------------------------------

    def _gate(self, name: str) -> Gate:
        gate = self._gates.get(name)
        if gate is None:
            raise NoTarget(f"there is no target {name!r}" + (": the router is closed" if self._closed else ""))
        return gate

    def _slots_of(self, run: Run) -> Slots:
        return self._slots[run.upstream.id]  # there as long as the run is

    def _freed(self, run: Run) -> None:
        slots = self._slots_of(run)
        slots.runs.discard(run)
        if slots.freed is not None:
            slots.freed.set()
            slots.freed = None
        self._pump(slots)
        self._forget_if_idle(slots)

    def _pump(self, slots: Slots) -> None:
        for name in slots.targets:
            self._gates[name].pump()

    def _forget_if_idle(self, slots: Slots) -> None:
        if not slots.targets and not slots.runs:
            self._slots.pop(slots.upstream.id, None)


def _fault_of(run: Run, why: Broken | Reply) -> Fault:
    if isinstance(why, Broken):
        return Fault(run.upstream.id, why.kind, why.detail)
    told = why.body[:200].decode(errors="replace")
    for value in run.upstream.headers.values():  # keys, for instance: a fault's text goes to callers
        for secret in value.split():
            told = told.replace(secret, "***")
    return Fault(run.upstream.id, FaultKind.STATUS, f"{why.status} {told}".strip())


async def _ended(slots: Slots, runs: frozenset[Run]) -> None:
    while runs & slots.runs:
        slots.freed = slots.freed or asyncio.Event()
        await slots.freed.wait()
