"""`/points`: the curve, one point, its samples; and the report of an export that failed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query

from eval_service.contract.errors import NotFound
from eval_service.contract.states import PointState
from eval_service.contract.wire import PointPage, PointReport, PointView, SamplePage, Step
from eval_service.gateway.services import Given
from eval_service.suites.samples import Which, read_samples

routes = APIRouter(tags=["points"])


@routes.get("/points")
def list_points(
    services: Given,
    run: str | None = None,
    state: PointState | None = None,
    suite: str | None = None,
    step: Annotated[Step | None, Query()] = None,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> PointPage:
    """Points by run and step."""
    return services.views.points(run=run, state=state, suite=suite, step=step, offset=offset, limit=limit)


@routes.get("/points/{id}")
def get_point(id: str, services: Given) -> PointView:
    """One point with its attempts."""
    return services.views.point(id)


@routes.get("/points/{id}/samples")
def get_samples(
    id: str,
    services: Given,
    which: Which = Which.ALL,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
) -> SamplePage:
    """What the model answered, prompt by prompt."""
    point = services.views.point(id)
    if point.samples_path is None or not Path(point.samples_path).is_file():
        raise NotFound(f"point {id} is {point.state} and has no samples", field="id")
    return read_samples(Path(point.samples_path), offset=offset, limit=limit, which=which)


@routes.post("/points/{id}/report")
def report(id: str, told: PointReport, services: Given) -> PointView:
    """A reserved point gets no snapshot: the controller ends it as `skipped`, for the reason told."""
    services.intents.report_export_failed(id, told.detail, told.reason)
    services.wake()
    return services.views.point(id)
