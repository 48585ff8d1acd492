"""`/points`: the curve, one point, its samples; and what may be asked of a point."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from eval_service.contract.errors import NotFound
from eval_service.contract.results import Comparison, SamplePage
from eval_service.contract.states import PointState
from eval_service.contract.wire import PointPage, PointReport, PointSort, PointView, Step
from eval_service.gateway.services import Given, Services, carried_out
from eval_service.ledger.orders import not_on_storage
from eval_service.suites.comparison import Page, Side, compare
from eval_service.suites.samples import SampleSort, Wanted, Which, read_samples

routes = APIRouter(tags=["points"])
ASKED: dict[int | str, dict[str, Any]] = {202: {"model": PointView, "description": "written, not carried out yet"}}


@routes.get("/points")
def list_points(
    services: Given,
    run: str | None = None,
    state: PointState | None = None,
    suite: str | None = None,
    step: Annotated[Step | None, Query()] = None,
    sort: PointSort = PointSort.STEP,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> PointPage:
    """Points by run and step, or in another order."""
    return services.views.points(run=run, state=state, suite=suite, step=step, sort=sort, offset=offset, limit=limit)


@routes.get("/points/{id}")
def get_point(id: str, services: Given) -> PointView:
    """One point with its attempts."""
    return services.views.point(id)


@routes.get("/points/{id}/samples")
async def get_samples(
    id: str,
    services: Given,
    which: Annotated[tuple[Which, ...], Query(description="of several, those of any")] = (Which.ALL,),
    sort: SampleSort = SampleSort.INDEX,
    search: Annotated[str | None, Query(max_length=1000, description="in prompt, output, answer or error")] = None,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
) -> SamplePage:
    """What the model answered, prompt by prompt."""
    point = await asyncio.to_thread(services.views.point, id)
    return await services.storage(_samples, point, offset, limit, Wanted.of(which, search, sort))


@routes.get("/points/{a}/compare/{b}")
async def compare_points(
    a: str,
    b: str,
    services: Given,
    dataset: str | None = None,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
    limit: Annotated[int, Query(ge=0, le=1000)] = 100,
) -> Comparison:
    """What b's samples say beside a's on the same prompts, and a page of the prompts whose score changed; 409 where
    the two were not asked the same."""
    first, second = [await asyncio.to_thread(services.views.point, point) for point in (a, b)]
    return await services.storage(_compared, first, second, dataset, Page(offset, limit))


@routes.post("/points/{id}/report", responses=ASKED)
async def report(id: str, told: PointReport, services: Given, response: Response) -> PointView:
    """A reserved point gets no snapshot: the controller ends it as `skipped`, for the reason told."""
    numbers = await asyncio.to_thread(services.orders.report_export_failed, id, told.detail, told.reason)
    return await _answer(services, id, numbers, response)


@routes.post("/points/{id}/cancel", responses=ASKED)
async def cancel(id: str, services: Given, response: Response) -> PointView:
    """Take a point back, also one that runs; 409 where it has ended otherwise."""
    return await _answer(services, id, await asyncio.to_thread(services.orders.cancel, id), response)


@routes.post("/points/{id}/retry", responses=ASKED)
async def retry(id: str, services: Given, response: Response) -> PointView:
    """A new attempt of an ended point, while its snapshot is there; else 409."""
    gone = await services.storage(not_on_storage, await asyncio.to_thread(services.orders.place_of, id))
    return await _answer(services, id, await asyncio.to_thread(services.orders.retry, id, gone), response)


@routes.post("/points/{id}/hold")
def hold(id: str, services: Given) -> PointView:
    """Keep a point's snapshot from garbage collection."""
    services.orders.hold(id)
    return services.views.point(id)


@routes.post("/points/{id}/release")
def release(id: str, services: Given) -> PointView:
    """Give a held snapshot back to garbage collection."""
    services.orders.release(id)
    return services.views.point(id)


def _samples(point: PointView, offset: int, limit: int, wanted: Wanted) -> SamplePage:
    return read_samples(_samples_of(point), offset=offset, limit=limit, wanted=wanted)


def _compared(first: PointView, second: PointView, dataset: str | None, page: Page) -> Comparison:
    return compare(_side(first), _side(second), direction=second.direction, dataset=dataset, page=page)


def _samples_of(point: PointView) -> Path:
    if point.samples_path is None or not Path(point.samples_path).is_file():
        raise NotFound(f"point {point.id} is {point.state} and has no samples", field="id")
    return Path(point.samples_path)


def _side(point: PointView) -> Side:
    return Side(point.id, point.run, point.step, point.suite, point.suite_digest, _samples_of(point))


async def _answer(services: Services, point: str, numbers: Collection[int], response: Response) -> PointView:
    await carried_out(services, numbers, response)
    return await asyncio.to_thread(services.views.point, point)
