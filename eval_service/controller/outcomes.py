"""How an attempt may end other than with a result; raised inside a lane, written by it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

from eval_service.contract.errors import Unavailable
from eval_service.contract.states import PointState, Reason
from eval_service.ledger.database import Fenced

log = logging.getLogger(__name__)


class LaneFault(Exception):
    """An infrastructure fault: the point goes back to `queued`."""

    def __init__(self, fault: str, detail: str) -> None:
        super().__init__(f"{fault}: {detail}")
        self.fault = fault
        self.detail = detail


class LaneEnd(Exception):
    """The point ends without a result."""

    def __init__(self, state: PointState, reason: Reason, detail: str) -> None:
        super().__init__(f"{state}: {reason}: {detail}")
        self.state = state
        self.reason = reason
        self.detail = detail


class Overtaken(Exception):
    """Somebody else ended the point; there is nothing to write."""


async def each_alone(points: Iterable[str], step: Callable[[str], Awaitable[object]]) -> None:
    """Take a step for each point: what goes wrong with one hinders no other."""
    for point in points:
        try:
            await step(point)
        except (Unavailable, Fenced):
            raise
        except Exception:
            log.exception("point %s", point)
