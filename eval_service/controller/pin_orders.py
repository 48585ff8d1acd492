"""What an engine is told to load for a point, and how it is proven: the same for a lane of whoever drives it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from eval_service.contract.manifest import Manifest
from eval_service.controller.fleet import Fleet
from eval_service.controller.pinning import Pinner
from eval_service.engine.protocol import PinOrder
from eval_service.fleet_config import ServiceConfig
from eval_service.ledger.moves import Runnable
from eval_service.objects.places import Places
from eval_service.objects.urls import is_url


@dataclass(frozen=True, slots=True)
class PinMaker:
    """Makes the pinners of lanes."""

    fleet: Fleet
    service: ServiceConfig
    restart_timeout_s: float
    on_trouble: Callable[[], None]
    places: Places
    clock: Callable[[], float] = time.monotonic

    def pinner(self, point: Runnable, manifest: Manifest, attempt: str) -> Pinner:
        """Of one attempt; its label is like no other's, over all runs."""
        fetch_s = self.places.fetch_timeout_s
        order = PinOrder(
            snapshot=point.snapshot,
            manifest=manifest,
            weight_version=f"{point.digest[:8]}.{point.id}.{attempt}",
            timeout_s=self.service.pin_timeout_s,
            visibility_timeout_s=fetch_s if is_url(point.snapshot) else self.service.visibility_timeout_s,
            roots=tuple(str(root) for root in self.service.roots),
        )
        return Pinner(
            self.fleet,
            order,
            self.restart_timeout_s,
            on_trouble=self.on_trouble,
            clock=self.clock,
            there=self.places.there,
        )
