"""`GET /events`: what becomes of points, drains and engines, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse

from eval_service.gateway.services import Given

routes = APIRouter(tags=["events"])


@routes.get("/events", response_class=StreamingResponse, responses={200: {"content": {"text/event-stream": {}}}})
async def events(
    services: Given,
    run: str | None = None,
    after: Annotated[int | None, Query(ge=0, le=2**63 - 1)] = None,
    last_event_id: Annotated[int | None, Header(ge=0, le=2**63 - 1)] = None,
) -> StreamingResponse:
    """Events from now on, or after `Last-Event-ID` (or `after`, for the first time); of one run, or all of them."""
    services.feed.check_room()
    if run is not None:
        await services.known(run)
    frames = services.feed.follow(run, after if last_event_id is None else last_event_id)
    first = await anext(frames)  # before the answer begins: who has it may count on hearing of all that comes after
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(_from(first, frames), media_type="text/event-stream", headers=headers)


async def _from(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    yield first
    async with aclosing(rest):
        async for frames in rest:
            yield frames
