"""The couriers as a deployment of their own: neither controller nor gateway has anything of them."""

from __future__ import annotations

from eval_service.contract.errors import Unavailable
from eval_service.fleet_config import FleetConfig
from eval_service.ledger.database import Database
from eval_service.trackers.bureau import Bureau


class TrackersDeployment:
    """Tells trackers, webhooks and traces."""

    def __init__(self, fleet: FleetConfig, ledger: str) -> None:
        fleet.service.state_dir.mkdir(parents=True, exist_ok=True)  # of this node
        self._bureau = Bureau(fleet, Database(ledger))
        self._bureau.start()

    def check_health(self) -> None:
        """Raises when one of them makes no progress, which no receiver can bring about."""
        if stuck := self._bureau.stuck():
            raise Unavailable(f"{', '.join(stuck)}: no progress")

    def __del__(self) -> None:
        self._bureau.close()
