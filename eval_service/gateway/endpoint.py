"""Where the proxy is reached, as callers are told."""

from __future__ import annotations

from dataclasses import dataclass

from eval_service.contract.serving import ServingView
from eval_service.ledger.servings import ServingRow, Servings

_WILDCARDS = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the proxy is reached, and who is served there."""

    servings: Servings
    host: str
    port: int

    def view(self, row: ServingRow, host: str | None) -> ServingView:
        """A serving as a caller sees it, who reached the service under `host`."""
        name = (host or "127.0.0.1") if self.host in _WILDCARDS else self.host
        name = f"[{name}]" if ":" in name else name
        return ServingView(
            point=row.point,
            url=f"http://{name}:{self.port}/lanes/{row.point}",
            until=row.until,
            open=not row.closed,
            engines=row.engines,
            weight_version=row.weight_version,
            detail=row.detail,
        )
