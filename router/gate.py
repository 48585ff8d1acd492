"""Admission to one target: first come, first served, sized by the upstreams that are there.

The capacity is server_concurrency x healthy upstreams, read afresh at every grant, so a fleet that changes resizes the
gate and drops nobody. A grant takes its slot in the same step, so no two waiters get one slot; a waiter that leaves at
that very moment gives it back. A waiter that can't have what is free (a replay) doesn't hold up those behind it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from router.errors import NoTarget, NoUpstream, QueueFull, WaitTimeout
from router.limits import Limits
from router.upstream import Run, Slots


@dataclass(eq=False, slots=True)
class _Waiter:
    granted: asyncio.Future[Run]
    excluded: frozenset[str]


class Gate:
    """One target's upstreams and those who wait for them."""

    def __init__(self, name: str, limits: Limits, freed: Callable[[Run], None], sequence: Callable[[], int]) -> None:
        self.name = name
        self.slots: dict[str, Slots] = {}
        self.in_flight = 0
        self.peak = 0
        self._limits = limits
        self._freed = freed
        self._sequence = sequence
        self._waiting: OrderedDict[_Waiter, None] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Requests at the gate."""
        return len(self._waiting)

    @property
    def capacity(self) -> int:
        """Requests that may be in flight now; 0 only while no upstream is healthy."""
        return self._limits.server_concurrency * sum(slots.healthy for slots in self.slots.values())

    def take(self, excluded: frozenset[str] = frozenset()) -> Run | None:
        """A slot as by `admit`, if one is to be had without waiting."""
        if not self._waiting and (slots := self._choice(excluded)):
            return self._grant(slots)
        return None

    async def admit(self, timeout_s: float, excluded: frozenset[str] = frozenset(), *, replay: bool = False) -> Run:
        """Wait for a slot on the upstream with the fewest requests in flight, none of `excluded` if it can be helped.

        A replay, having been let in before, stands in front and is never refused for want of waiting room.

        Raises:
            QueueFull: the waiting room is full.
            NoUpstream, WaitTimeout: `timeout_s` passed.
            NoTarget: the target was dropped meanwhile.
        """
        if (run := self.take(excluded)) is not None:
            return run
        waiter = self._enter(excluded, replay)
        loop = asyncio.get_running_loop()
        leniency = loop.call_later(self._limits.same_again_after_s, self._forgive, waiter) if excluded else None
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter.granted
        except BaseException as exc:
            self._leave(waiter)
            if isinstance(exc, TimeoutError):
                raise self._too_late(timeout_s) from exc
            raise
        finally:
            if leniency is not None:
                leniency.cancel()

    def release(self, run: Run) -> None:
        """A granted slot is free again."""
        self.in_flight -= 1
        self._freed(run)

    def pump(self) -> None:
        """Let in whoever can go in now."""
        while self._waiting and self._choice(frozenset()) and self._let_one_in():
            pass

    def shut(self) -> None:
        """The target is dropped: nobody waits any longer."""
        while self._waiting:
            waiter, _ = self._waiting.popitem(last=False)
            if not waiter.granted.done():
                waiter.granted.set_exception(NoTarget(f"target {self.name!r} was dropped"))

    def _choice(self, excluded: frozenset[str]) -> Slots | None:
        best: Slots | None = None
        least = self._limits.server_concurrency
        for slots in self.slots.values():
            busy = len(slots.runs)
            if busy > least or not slots.healthy or slots.upstream.id in excluded:
                continue
            if busy < least or (best is not None and slots.last_granted < best.last_granted):
                best, least = slots, busy
        return best

    def _grant(self, slots: Slots) -> Run:
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        return slots.grant(self._sequence())

    def _enter(self, excluded: frozenset[str], replay: bool) -> _Waiter:
        if not replay and self.waiting >= self._limits.max_waiting:
            raise QueueFull(f"target {self.name!r}: {self.waiting} requests wait already")
        waiter = _Waiter(asyncio.get_running_loop().create_future(), excluded)
        self._waiting[waiter] = None
        if replay:
            self._waiting.move_to_end(waiter, last=False)
        self.pump()
        return waiter

    def _leave(self, waiter: _Waiter) -> None:
        if waiter in self._waiting:
            del self._waiting[waiter]
        elif _was_granted(waiter):
            self.release(waiter.granted.result())

    def _forgive(self, waiter: _Waiter) -> None:
        waiter.excluded = frozenset()
        self.pump()

    def _let_one_in(self) -> bool:
        for waiter in self._waiting:
            if slots := self._choice(waiter.excluded):
                del self._waiting[waiter]
                if not waiter.granted.done():
                    waiter.granted.set_result(self._grant(slots))
                return True
        return False

    def _too_late(self, timeout_s: float) -> NoUpstream | WaitTimeout:
        if not self.capacity:
            return NoUpstream(f"target {self.name!r}: no healthy upstream came within {timeout_s:.3g} s")
        return WaitTimeout(f"target {self.name!r}: no upstream had room within {timeout_s:.3g} s")


def _was_granted(waiter: _Waiter) -> bool:
    return waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None
