"""What goes over HTTP for a point that is served to people, through the proxy."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from eval_service.contract.results import Wire


class ServeRequest(Wire):
    """`POST /points/{id}/serve`: engines for whoever asks, under `/lanes/{id}` of the proxy. Again: for longer."""

    for_s: Annotated[float, Field(gt=0, le=7 * 86400)] = 3600.0


class ServingView(Wire):
    """A point whose snapshot is served."""

    point: str
    url: str = Field(description="base of the engines' routes; an OpenAI client takes it with /v1")
    until: float
    open: bool = Field(description="False: it is ending, and requests are refused")
    engines: int = Field(description="that serve it now; with none, requests wait")
    weight_version: str | None
    detail: str | None = Field(description="why no engine serves it")
