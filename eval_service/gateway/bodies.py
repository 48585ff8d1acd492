"""Bounds of a request's body: its size, by its declared or its actual length, and the time that it may take to come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eval_service.contract.errors import ErrorBody
from eval_service.gateway.envelopes import envelope

MAX_BODY_BYTES = 1 << 20
BODY_S = 30.0


@dataclass
class BodyLimit:
    """Refuses a body that is too large, or too slow."""

    app: ASGIApp
    body_s: float = BODY_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its body counted and timed."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or len(declared) > 20 or int(declared) > MAX_BODY_BYTES:
            await _too_large()(scope, receive, send)
            return
        await self.app(scope, _bounded(receive, self.body_s), send)


def _too_large() -> Response:
    body = ErrorBody(code="too_large", message=f"a body may have {MAX_BODY_BYTES} bytes")
    return envelope(413, body, {"connection": "close"})


def _bounded(receive: Receive, body_s: float) -> Callable[[], Awaitable[Message]]:
    """Only until the body is whole: what is received after it is the client's leaving, which may take for ever."""
    seen, whole = 0, False
    until = asyncio.get_running_loop().time() + body_s

    async def bounded() -> Message:
        nonlocal seen, whole
        if whole:
            return await receive()
        try:
            async with asyncio.timeout_at(until):
                message = await receive()
        except TimeoutError as exc:
            raise HTTPException(408, f"a body may take {body_s:g} s to come") from exc
        seen += len(message.get("body", b""))
        whole = not message.get("more_body", False)
        if seen > MAX_BODY_BYTES:
            raise HTTPException(413, f"a body may have {MAX_BODY_BYTES} bytes")
        return message

    return bounded
