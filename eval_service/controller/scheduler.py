"""Which free engine goes to which point: a pure function, so that its promises can be tested without a fleet."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval_service.ledger.moves import Runnable


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """A running lane as the scheduler sees it."""

    point: Runnable
    engines: int  # leased to it, pinning ones included
    room: int  # further engines that its unsent work is worth


@dataclass(frozen=True, slots=True)
class Lease:
    """Give an engine to a point: a running lane's, or a queued one whose lane starts with it."""

    engine: str
    point: str


def plan(
    queued: Sequence[Runnable],
    lanes: Sequence[LaneLoad],
    free: Sequence[str],
    workload: Mapping[str, int],
) -> list[Lease]:
    """Lease the free engines: running lanes first, then queued points by priority, fair share, force and step.

    Args:
        queued: points that may start.
        lanes: points that run.
        free: ids of engines nobody has.
        workload: how many engines each queued point's work is worth (by suite name).
    """
    left = list(free)
    leases: list[Lease] = []
    held: dict[str, int] = {}
    for lane in lanes:
        held[lane.point.run] = held.get(lane.point.run, 0) + lane.engines
    for lane in lanes:
        take = min(lane.room, _quota_left(lane.point, held), len(left))
        leases += _take(lane.point, take, left, held)
    waiting = list(queued)
    while left and waiting:
        point = min(waiting, key=lambda point: _order(point, held))
        waiting.remove(point)
        take = min(max(1, workload.get(point.suite, 1)), _quota_left(point, held), len(left))
        leases += _take(point, take, left, held)
    return leases


def _order(point: Runnable, held: Mapping[str, int]) -> tuple[int, int, bool, int, int]:
    return (-point.priority, held.get(point.run, 0), not point.force, point.step, point.seq)


def _quota_left(point: Runnable, held: Mapping[str, int]) -> int:
    if point.max_engines is None:
        return sys.maxsize
    return max(0, point.max_engines - held.get(point.run, 0))


def _take(point: Runnable, count: int, left: list[str], held: dict[str, int]) -> list[Lease]:
    held[point.run] = held.get(point.run, 0) + count
    return [Lease(left.pop(0), point.id) for _ in range(count)]
