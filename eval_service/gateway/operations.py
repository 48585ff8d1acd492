"""`/status`, `/fleet`, `/healthz`, `/readyz`, `/metrics`."""

from __future__ import annotations

from fastapi import APIRouter, Response

from eval_service.contract.errors import Unavailable
from eval_service.contract.scaling import ScaleReply, ScaleRequest
from eval_service.contract.wire import FleetView, Health, StatusView
from eval_service.gateway.services import Given

routes = APIRouter(tags=["operations"])


@routes.get("/status")
def status(services: Given) -> StatusView:
    """Fleet, runs, counts by state."""
    return services.views.status()


@routes.get("/fleet")
def fleet(services: Given) -> FleetView:
    """Engines, pins, in flight."""
    return services.views.fleet()


@routes.post("/fleet/{group}/scale")
def scale(group: str, wanted: ScaleRequest, services: Given) -> ScaleReply:
    """Set how many engines a group should have, within its bounds; points under way lose nothing."""
    reply = services.scaling.order(group, wanted.engines)
    services.wake()
    return reply


@routes.get("/healthz")
async def healthz() -> Health:
    """Alive."""
    return Health(ok=True)


@routes.get("/readyz")
def readyz(services: Given) -> Health:
    """The ledger can be written and a controller acts; engines are another matter, see `/fleet`."""
    services.intents.probe()
    if not services.views.controller_alive():
        raise Unavailable("no controller has shown itself for some seconds", hint="see /status")
    return Health(ok=True)


@routes.get("/metrics", response_class=Response)
def metrics(services: Given) -> Response:
    """Prometheus' text format."""
    body, content_type = services.metrics.render()
    return Response(body, media_type=content_type)
