"""Couriers over a test's ledger: with a receiver that does as it is told, or with the real worker's process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eval_service.ledger.deliveries import Deliveries
from eval_service.trackers.config import Target
from eval_service.trackers.courier import Courier, Report
from eval_service.trackers.process import Worker
from eval_service.trackers.told import Item
from tests.support.ledger import Ledger


@dataclass
class FakeReceiver:
    """Keeps what it is told; `down` runs (or all, with "*") get an error."""

    told: list[Item] = field(default_factory=list)
    asked: list[list[str]] = field(default_factory=list)
    down: set[str] = field(default_factory=set)

    def deliver(self, items: Sequence[Item]) -> Report:
        """See `courier.Receiver`."""
        self.asked.append([item["run"] for item in items])
        if self.down & {"*", items[0]["run"]}:
            return Report(frozenset(), error="down")
        self.told += items
        return Report(frozenset(item["id"] for item in items))

    def close(self) -> None:
        """Nothing to let go of."""

    @property
    def seen(self) -> list[tuple[str, int]]:
        """Events and steps."""
        return [(item["event"], item["point"]["step"]) for item in self.told if "point" in item]


def courier(ledger: Ledger, target: Target, receiver: FakeReceiver, name: str = "tracker:t") -> Courier:
    """One whose steps the test takes."""
    return Courier(name, target, Deliveries(ledger.db), receiver, clock=time.monotonic)


def catch_up(one: Courier) -> None:
    """Until there is no more to tell."""
    while one.step():
        pass


def tell(ledger: Ledger, kind: str, target: Target, base: Path) -> None:
    """All that there is to tell, by a worker of its own."""
    log = base / "worker.log"
    one = Courier(f"tracker:{kind}", target, Deliveries(ledger.db), Worker(kind, target, state_dir=base, log=log))
    try:
        catch_up(one)
    finally:
        one.close()
    (state,) = Deliveries(ledger.db).states()
    assert state.waiting == 0, f"{state.error}: {log.read_text()}"
