"""Builds the FastAPI application. It knows the ledger and a best-effort way to wake the controller; nothing of Ray.

Invariants: no request reads or hashes a snapshot; every error is the one envelope; a body over `MAX_BODY_BYTES` is
refused before it is read; no controller need be alive for a dispatch to be answered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eval_service.contract.errors import ErrorBody, ErrorEnvelope, EvalfleetError, InvalidRequest
from eval_service.gateway import dashboard, dispatch, drains, events, operations, points, runs, servings
from eval_service.gateway.services import Services

MAX_BODY_BYTES = 1 << 20
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}


def build_app(services: Services) -> FastAPI:
    """The application, with every route and the error envelope."""
    app = FastAPI(
        title="Evalfleet",
        version=services.version,
        description="Evaluates every checkpoint of a training run while the run goes on.",
        dependencies=[Depends(_check_query)],
        responses={"default": {"model": ErrorEnvelope, "description": "any error"}},
    )
    app.state.services = services
    for module in (dashboard, dispatch, drains, runs, points, servings, events, operations):
        app.include_router(module.routes)
    app.add_exception_handler(EvalfleetError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(_BodyLimit)
    return app


def _envelope(status: int, body: ErrorBody, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(ErrorEnvelope(error=body).model_dump(exclude_none=True), status_code=status, headers=headers)


async def _on_error(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, EvalfleetError)
    headers = {"retry-after": "1"} if exc.status in (429, 503) else None
    return _envelope(exc.status, exc.envelope().error, headers)


async def _on_invalid(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestValidationError)
    fault = exc.errors()[0]
    # Of JSON that can't be read, the place is an offset and no field.
    named = fault["loc"] if fault["type"] != "json_invalid" else ()
    where = [str(part) for part in named if part not in ("body", "query", "path")]
    unknown = fault["type"] == "extra_forbidden"
    body = ErrorBody(
        code="invalid_request",
        message="unknown field" if unknown else str(fault["msg"]),
        field=".".join(where) or None,
        hint="remove it; /openapi.json lists the fields" if unknown else None,
    )
    return _envelope(422, body)


async def _on_http(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    code = _CODES.get(exc.status_code, "http_error")
    return _envelope(exc.status_code, ErrorBody(code=code, message=str(exc.detail)))


async def _on_bug(_request: Request, exc: Exception) -> Response:
    """Starlette writes the traceback to the log; the caller gets its name."""
    return _envelope(500, ErrorBody(code="internal", message=f"{type(exc).__name__}; the service's log has the rest"))


async def _check_query(request: Request) -> None:
    """A misspelt parameter would be left out in silence, and the answer be that to another question."""
    route = request.scope["route"]
    known = [parameter.alias for parameter in route.dependant.query_params]
    for name in request.query_params:
        if name not in known:
            hint = f"there is: {', '.join(known)}" if known else "this route has none"
            raise InvalidRequest("unknown query parameter", field=name, hint=hint)


@dataclass
class _BodyLimit:
    """Refuses a body that is too large, by its declared or its actual length."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > MAX_BODY_BYTES:
            await _too_large()(scope, receive, send)
            return
        await self.app(scope, _counted(receive), send)


def _too_large() -> JSONResponse:
    return _envelope(413, ErrorBody(code="too_large", message=f"a body may have {MAX_BODY_BYTES} bytes"))


def _counted(receive: Receive) -> Callable[[], Awaitable[Message]]:
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MAX_BODY_BYTES:
            raise HTTPException(413, f"a body may have {MAX_BODY_BYTES} bytes")
        return message

    return counted
