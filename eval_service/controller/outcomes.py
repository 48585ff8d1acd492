"""How an attempt may end other than with a result; raised inside a lane, written by it."""

from __future__ import annotations

from eval_service.contract.states import PointState, Reason


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
