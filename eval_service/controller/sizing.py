"""How many engines each group should have now: what was asked for, what the work is worth, or what the config says.

The decision is shown with the fleet; Serve's autoscaling policy follows what is shown. More engines are wanted at once,
fewer only when less would have done for `idle_timeout_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from eval_service.contract.wire import SizedBy
from eval_service.controller.scheduler import Claim
from eval_service.fleet_config import GroupConfig


@dataclass(frozen=True, slots=True)
class Size:
    """How many, and what that comes from."""

    engines: int
    by: SizedBy


class Sizes:
    """Of all groups.

    Args:
        before: what was decided before this controller acted; counts are kept over a change of controllers.
        clock: monotonic seconds.
    """

    def __init__(
        self, groups: Mapping[str, GroupConfig], before: Mapping[str, int], clock: Callable[[], float]
    ) -> None:
        self._groups = groups
        self._clock = clock
        self._needed_at = dict.fromkeys(groups, clock())
        self.now = {
            name: Size(_within(group, before.get(name, group.desired)), "config") for name, group in groups.items()
        }

    def decide(self, ordered: Mapping[str, int], work: int) -> bool:
        """Decide anew; whether anything changed.

        Args:
            ordered: counts that people have asked for, by group; one that the config no longer allows is bounded.
            work: engines that the open points are worth.
        """
        before = dict(self.now)
        for name, group in self._groups.items():
            self.now[name] = self._size(name, group, ordered.get(name), work)
        return self.now != before

    def _size(self, name: str, group: GroupConfig, ordered: int | None, work: int) -> Size:
        if group.kind in ("attached", "placeholder"):
            return Size(group.desired, "config")
        if ordered is not None:
            return Size(_within(group, ordered), "scale")
        if not group.autoscale:
            return Size(group.desired, "config")
        return Size(self._by_work(name, group, _within(group, work)), "work")

    def _by_work(self, name: str, group: GroupConfig, worth: int) -> int:
        last, now = self.now[name].engines, self._clock()
        if worth >= last:
            self._needed_at[name] = now
            return worth
        return last if now - self._needed_at[name] < group.idle_timeout_s else worth


def worth(claims: Iterable[Claim]) -> int:
    """Engines that open points have, and have use for; a run's quota bounds what it can use."""
    by_run: dict[str, int] = {}
    quotas: dict[str, int | None] = {}
    for claim in claims:
        run = claim.point.run
        by_run[run] = by_run.get(run, 0) + claim.engines + claim.wants
        quotas[run] = claim.point.max_engines
    return sum(count if (quota := quotas[run]) is None else min(count, quota) for run, count in by_run.items())


def _within(group: GroupConfig, count: int) -> int:
    if group.kind in ("attached", "placeholder"):
        return group.desired
    least, most = group.bounds
    return max(least, min(most, count))
