"""Serve's autoscaling policy of a group: as many replicas as the service says that there should be engines.

It runs on the loop of Serve's own controller, where nothing may block or raise: the ledger is looked at in a thread,
and what was last seen there counts. Until something was shown since the policy began, a group stays as it is: what an
earlier service wanted may be no longer so.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from eval_service.contract.wire import FleetView
from eval_service.ledger.database import FLEET, Database

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

LOOK_EVERY_S = 0.5
log = logging.getLogger(__name__)


class DesiredCount:
    """The policy; Serve makes one for each deployment.

    Args:
        ledger: its URL.
        group: whose count it follows.
    """

    def __init__(self, ledger: str, group: str) -> None:
        self._url = ledger
        self._group = group
        self._database: Database | None = None
        self._seen: int | None = None
        self._since = time.time()
        self._looked_at = float("-inf")
        self._looking = threading.Lock()

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """How many replicas there should be, and no state that Serve would have to keep."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_EVERY_S and self._looking.acquire(blocking=False):
            self._looked_at = now
            try:
                threading.Thread(target=self._look, name=f"desired {self._group}", daemon=True).start()
            except RuntimeError:  # the host would not have one more thread
                self._looking.release()
        return (context.target_num_replicas if self._seen is None else self._seen), {}

    def _look(self) -> None:
        try:
            if self._database is None:
                self._database = Database(self._url)
            shown = self._database.read_meta(FLEET)
            groups = FleetView.model_validate_json(shown[0]).groups if shown and shown[1] >= self._since else ()
            self._seen = next((group.desired for group in groups if group.name == self._group), self._seen)
        except Exception as exc:  # noqa: BLE001 - a thread's edge: what was seen before stays
            log.warning("how many engines %s should have can't be told: %r", self._group, exc)
        finally:
            self._looking.release()
