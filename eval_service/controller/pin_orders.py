"""What an engine is told to load for a point, and how it is proven: the same for a lane of whoever drives it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eval_service.admission.place import check_inside
from eval_service.contract.errors import SnapshotUnsafe
from eval_service.contract.manifest import Manifest
from eval_service.controller.db import LedgerThread
from eval_service.controller.fleet import Fleet
from eval_service.controller.pinning import Pinner
from eval_service.engine.protocol import PinOrder
from eval_service.fleet_config import ServiceConfig
from eval_service.ledger.moves import Runnable
from eval_service.ledger.proofs import Proofs
from eval_service.objects.places import Places
from eval_service.objects.urls import is_url


@dataclass(frozen=True, slots=True)
class PinMaker:
    """Makes the pinners of lanes.

    `proofs`: of former controllers, which a pinner asks for only where a pin has failed more than once.
    """

    fleet: Fleet
    service: ServiceConfig
    restart_timeout_s: float
    on_trouble: Callable[[], None]
    places: Places
    proofs: Proofs
    ledger: LedgerThread
    clock: Callable[[], float] = time.monotonic

    def pinner(self, point: Runnable, manifest: Manifest, attempt: str) -> Pinner:
        """Of one attempt; its label is like no other's, over all runs."""
        return Pinner(
            self.fleet,
            self._order(point.snapshot, manifest, f"{point.digest[:8]}.{point.id}.{attempt}"),
            self.restart_timeout_s,
            on_trouble=self.on_trouble,
            clock=self.clock,
            there=self._there,
            former=self,
        )

    async def proven(self, digest: str) -> bool:
        """Whether an engine was proven to hold a content under a former controller."""
        return await self.ledger.patiently(self.proofs.has, digest)

    async def others(self, manifest: Manifest) -> list[PinOrder]:
        """Orders for what engines were proven to hold of other content, the newest proof first."""
        found = await self.ledger.patiently(self.proofs.others, manifest)
        return [self._order(one.path, one.manifest, f"{one.manifest.digest[:8]}.{uuid.uuid4().hex}") for one in found]

    def _order(self, snapshot: str, manifest: Manifest, label: str) -> PinOrder:
        fetch_s = self.places.fetch_timeout_s
        return PinOrder(
            snapshot=snapshot,
            manifest=manifest,
            weight_version=label,
            timeout_s=self.service.pin_timeout_s,
            visibility_timeout_s=fetch_s if is_url(snapshot) else self.service.visibility_timeout_s,
            roots=tuple(str(root) for root in self.service.roots),
        )

    def _there(self, snapshot: str, digest: str) -> bool:
        """Whether it could be loaded again: the service's roots may be others than those of a former controller."""
        if not is_url(snapshot):
            try:
                check_inside(Path(snapshot), self.service.roots)
            except SnapshotUnsafe:
                return False
        return self.places.there(snapshot, digest)
