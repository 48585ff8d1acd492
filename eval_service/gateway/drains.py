"""`POST /drain` and `GET /drains/{id}`: long polls under one drain id, resumable after a restart of anything."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from eval_service.contract.wire import DrainRequest, Receipt
from eval_service.gateway.services import Given, Services
from eval_service.gateway.waiting import LONG_POLL_S, spread

routes = APIRouter(tags=["drain"])


@routes.post("/drain")
async def drain(request: DrainRequest, services: Given) -> Receipt:
    """Begin a drain, or go on with one; answers when it is over, else after 10 to 20 s with `open` set."""
    started = await asyncio.to_thread(services.intents.begin_drain, request)
    services.wake()
    return await _wait(services, started, spread(LONG_POLL_S))


@routes.get("/drains/{id}")
async def receipt(
    id: str,
    services: Given,
    wait_s: Annotated[float, Query(ge=0, le=LONG_POLL_S)] = 0.0,
) -> Receipt:
    """A drain's receipt; with `wait_s` it waits for the end."""
    return await _wait(services, id, wait_s)


async def _wait(services: Services, drain: str, wait_s: float) -> Receipt:
    found, kept = await asyncio.to_thread(services.views.receipt_as_kept, drain)
    if found.open and wait_s > 0:
        await services.drains.wait(drain, wait_s)
        found, kept = await asyncio.to_thread(services.views.receipt_as_kept, drain)
    if kept or found.open:
        return found
    # The controller has not done so; the first receipt is kept, and all callers get that one.
    await asyncio.to_thread(services.intents.end_drain, drain)
    return await asyncio.to_thread(services.views.receipt, drain)
