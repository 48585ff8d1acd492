"""Builds the FastAPI application. It knows the ledger and a best-effort way to wake the controller; nothing of Ray.

Invariants: no request reads or hashes a snapshot; every error is the one envelope; a body over `MAX_BODY_BYTES` is
refused before it is read; no controller need be alive for a dispatch to be answered; whoever may not ask is refused
before anything else is looked at (`guard.py`). There is no page of documentation: it would load another host's scripts
into the origin whose storage holds a reader's token.
"""

from __future__ import annotations

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from eval_service.contract.errors import ErrorBody, ErrorEnvelope, EvalfleetError, InvalidRequest
from eval_service.gateway import curves, dashboard, dispatch, drains, events, operations, points, runs, servings
from eval_service.gateway.bodies import BODY_S, BodyLimit
from eval_service.gateway.envelopes import envelope, refusal
from eval_service.gateway.guard import Guard
from eval_service.gateway.services import Services

# Only so that the document says it: who may ask is decided before (`guard.py`).
_TOKEN = HTTPBearer(scheme_name="token", description="where the service wants one", auto_error=False)
_CODES = {404: "not_found", 405: "method_not_allowed", 408: "too_slow", 413: "too_large"}


def build_app(services: Services, *, body_s: float = BODY_S) -> FastAPI:
    """The application, with every route and the error envelope."""
    app = FastAPI(
        title="Evalfleet",
        version=services.version,
        description="Evaluates every checkpoint of a training run while the run goes on.",
        dependencies=[Depends(_check_query), Depends(_TOKEN)],
        responses={"default": {"model": ErrorEnvelope, "description": "any error"}},
        docs_url=None,
        redoc_url=None,
    )
    app.state.services = services
    for module in (dashboard, curves, dispatch, drains, runs, points, servings, events, operations):
        app.include_router(module.routes)
    app.add_exception_handler(EvalfleetError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(BodyLimit, body_s=body_s)
    app.add_middleware(Guard, access=services.access)
    return app


async def _on_error(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, EvalfleetError)
    return refusal(exc)


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
    return envelope(422, body)


async def _on_http(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    if exc.status_code == 400:  # FastAPI's, of a body that can't even be decoded; like any other that is no such object
        body = ErrorBody(code=InvalidRequest.code, message="the body can't be read", hint="send JSON in UTF-8")
        return envelope(InvalidRequest.status, body)
    code = _CODES.get(exc.status_code, "http_error")
    # Of what is refused while its body still comes nothing more is wanted.
    headers = {"connection": "close"} if exc.status_code in (408, 413) else None
    return envelope(exc.status_code, ErrorBody(code=code, message=str(exc.detail)), headers)


async def _on_bug(_request: Request, exc: Exception) -> Response:
    """Starlette writes the traceback to the log; the caller gets its name."""
    return envelope(500, ErrorBody(code="internal", message=f"{type(exc).__name__}; the service's log has the rest"))


async def _check_query(request: Request) -> None:
    """A misspelt parameter would be left out in silence, and the answer be that to another question."""
    route = request.scope["route"]
    known = [parameter.alias for parameter in route.dependant.query_params]
    for name in request.query_params:
        if name not in known:
            hint = f"there is: {', '.join(known)}" if known else "this route has none"
            raise InvalidRequest("unknown query parameter", field=name, hint=hint)
