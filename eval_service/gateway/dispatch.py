"""`POST /dispatch`: reserve a step's points, or hand their snapshot over."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response

from eval_service.contract.errors import Busy
from eval_service.contract.wire import DispatchReply, DispatchRequest, Granted
from eval_service.gateway.services import LONG_POLL_S, LOOK_S, Given

routes = APIRouter(tags=["dispatch"])


@routes.post("/dispatch", status_code=202, responses={200: {"model": DispatchReply}})
async def dispatch(request: DispatchRequest, response: Response, services: Given) -> DispatchReply:
    """202 granted or taken in, 200 known or skipped; 429 only while backpressure waits."""
    reply = await _wait_for_room(request, services)
    if reply.outcome in (Granted.KNOWN, Granted.SKIPPED):
        response.status_code = 200
    services.wake()
    return reply


async def _wait_for_room(request: DispatchRequest, services: Given) -> DispatchReply:
    """Try until there is room, the caller's own wait is over, or a long poll has lasted long enough."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        waited = loop.time() - began
        left = request if request.wait_s is None else request.model_copy(update={"wait_s": _less(request, waited)})
        try:
            return await asyncio.to_thread(services.intents.dispatch, left)
        except Busy:
            if waited >= LONG_POLL_S:
                raise
        await asyncio.sleep(LOOK_S)


def _less(request: DispatchRequest, waited: float) -> float:
    assert request.wait_s is not None
    return max(0.0, request.wait_s - waited)
