"""`POST /dispatch`: reserve a step's points, or hand their snapshot over.

Nothing is read in the request: a snapshot's path is judged as it is written. Dispatches that come while others are
being committed share the next transaction.
"""

from __future__ import annotations

import asyncio
from functools import partial

from fastapi import APIRouter, Response

from eval_service.contract.errors import Busy
from eval_service.contract.wire import DispatchReply, DispatchRequest, Granted
from eval_service.gateway.services import Given
from eval_service.gateway.waiting import LONG_POLL_S

routes = APIRouter(tags=["dispatch"])


@routes.post("/dispatch", status_code=202, responses={200: {"model": DispatchReply}})
async def dispatch(request: DispatchRequest, response: Response, services: Given) -> DispatchReply:
    """202 granted or taken in, 200 known or skipped; 429 only while backpressure waits."""
    path = services.intents.as_written(request)
    if request.snapshot is not None and path is None:
        path = await services.storage(services.intents.followed, request)
    reply = await _wait_for_room(request, path, services)
    if reply.outcome in (Granted.KNOWN, Granted.SKIPPED):
        response.status_code = 200
    if request.snapshot is not None:  # a reservation alone gives the controller nothing to do at once
        services.wake()
    return reply


async def _wait_for_room(request: DispatchRequest, path: str | None, services: Given) -> DispatchReply:
    """Try until there is room, the caller's own wait is over, or a long poll has lasted long enough."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        waited = loop.time() - began
        left_s = None if request.wait_s is None else max(0.0, request.wait_s - waited)
        left = request if left_s is None else request.model_copy(update={"wait_s": left_s})
        try:
            return await services.write(partial(services.intents.dispatch_within, request=left, path=path))
        except Busy:
            if waited >= LONG_POLL_S:
                raise
        await services.room.wait(request.run, LONG_POLL_S - waited if left_s is None else left_s)
