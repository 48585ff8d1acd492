"""`/points/{id}/serve`: a point's snapshot for whoever asks, through the proxy; it ends by its time or by DELETE."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from eval_service.contract.errors import Conflict
from eval_service.contract.serving import ServeRequest, ServingView
from eval_service.gateway.endpoint import Endpoint
from eval_service.gateway.services import Given, Services, seen
from eval_service.ledger.servings import ServingRow

routes = APIRouter(tags=["serving"])


@routes.post("/points/{id}/serve", responses={202: {"model": ServingView, "description": "no engine serves it yet"}})
async def serve(id: str, services: Given, request: Request, response: Response, asked: ServeRequest) -> ServingView:
    """Serve a point that has ended, for so long from now; 202 where no engine does so yet: requests wait for one."""
    endpoint = _endpoint(services)
    await asyncio.to_thread(endpoint.servings.open, id, asked.for_s)
    services.wake()
    row = await seen(services, lambda: endpoint.servings.get(id), lambda row: row.engines > 0)
    if not row.engines:
        response.status_code = 202
    return endpoint.view(row, request.url.hostname)


@routes.get("/points/{id}/serve")
async def get_serving(id: str, services: Given, request: Request) -> ServingView:
    """How a serving does; 404 where there is none (any more)."""
    endpoint = _endpoint(services)
    return endpoint.view(await asyncio.to_thread(endpoint.servings.get, id), request.url.hostname)


@routes.delete("/points/{id}/serve", responses={202: {"model": ServingView, "description": "not let go of yet"}})
async def end_serving(id: str, services: Given, request: Request, response: Response) -> ServingView:
    """End a serving: its engines go on to points, and requests are refused with 410."""
    endpoint = _endpoint(services)
    row = await asyncio.to_thread(endpoint.servings.get, id)
    await asyncio.to_thread(endpoint.servings.close, id)
    services.wake()
    left = await seen(services, lambda: endpoint.servings.find(id), lambda row: row is None or not row.closed)
    if left is not None:
        response.status_code = 202
    ended = ServingRow(id, row.until, True, left.engines if left else 0, None, None)
    return endpoint.view(ended, request.url.hostname)


def _endpoint(services: Services) -> Endpoint:
    if services.endpoint is None:
        raise Conflict("the service has no proxy", hint="set service.proxy_port in fleet.toml")
    return services.endpoint
