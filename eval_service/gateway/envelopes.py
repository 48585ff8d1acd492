"""The one envelope of every error, as a response."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fastapi.responses import JSONResponse

from eval_service.contract.errors import ErrorBody, ErrorEnvelope, EvalfleetError, Unauthorized

NO_SNIFFING = {"x-content-type-options": "nosniff"}


def envelope(status: int, body: ErrorBody, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error as it goes out."""
    told = {**NO_SNIFFING, **(headers or {})}
    return JSONResponse(ErrorEnvelope(error=body).model_dump(exclude_none=True), status_code=status, headers=told)


def refusal(error: EvalfleetError, *, wait_s: float = 1.0) -> JSONResponse:
    """An error of ours, with what its status wants beside it."""
    headers = {}
    if error.status in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return envelope(error.status, error.envelope().error, headers)
