"""`/runs`: make a run known, look at it, tell its progress; pause, resume, cancel, backfill, delete."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from eval_service.contract.results import Advice, Direction
from eval_service.contract.wire import Progress, RunCommandReply, RunSpec, RunView
from eval_service.gateway.services import Given, Services, carried_out
from eval_service.ledger.advising import Question
from eval_service.ledger.orders import Asked

routes = APIRouter(tags=["runs"])
ASKED: dict[int | str, dict[str, Any]] = {
    202: {"model": RunCommandReply, "description": "written, not carried out yet"}
}


@routes.put("/runs/{run}")
def put_run(run: str, spec: RunSpec, services: Given) -> RunView:
    """Make a run known, or change what it is."""
    services.intents.put_run(run, spec)
    services.wake()
    return services.views.run(run)


@routes.get("/runs")
def list_runs(services: Given) -> tuple[RunView, ...]:
    """All runs, oldest first."""
    return services.views.runs()


@routes.get("/runs/{run}")
def get_run(run: str, services: Given) -> RunView:
    """One run."""
    return services.views.run(run)


@routes.get("/runs/{run}/advice")
def get_advice(
    run: str,
    services: Given,
    suite: str | None = None,
    metric: str | None = None,
    direction: Direction | None = None,
    patience: Annotated[int, Query(ge=1, le=1_000_000)] = 3,
    min_delta: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0,
) -> Advice:
    """The best point so far, and whether `patience` points in a row brought nothing better; 422 for no such metric."""
    return services.advisor.advice(run, Question(suite, metric, direction, patience, min_delta))


@routes.post("/runs/{run}/progress", status_code=204)
def progress(run: str, told: Progress, services: Given) -> None:
    """The trainer's step, so that lag can be known."""
    services.intents.progress(run, told.step)


@routes.delete("/runs/{run}", status_code=202)
def delete_run(run: str, services: Given) -> RunView:
    """Cancel what is open, then delete the run's results and our own snapshots of it; never a caller's directory."""
    services.orders.delete_run(run)
    services.wake()
    return services.views.run(run)


@routes.post("/runs/{run}/pause")
def pause(run: str, services: Given) -> RunView:
    """Start no further points of a run; what runs goes on."""
    services.orders.pause(run)
    return services.views.run(run)


@routes.post("/runs/{run}/resume")
def resume(run: str, services: Given) -> RunView:
    """End a pause."""
    services.orders.resume(run)
    services.wake()
    return services.views.run(run)


@routes.post("/runs/{run}/cancel", responses=ASKED)
async def cancel(run: str, services: Given, response: Response) -> RunCommandReply:
    """Take back every point of a run that has not ended."""
    return await _answer(services, await asyncio.to_thread(services.orders.cancel_run, run), response)


@routes.post("/runs/{run}/backfill", responses=ASKED)
async def backfill(run: str, services: Given, response: Response) -> RunCommandReply:
    """Retry what was skipped or failed while its snapshot is there, and tell what was left."""
    return await _answer(services, await asyncio.to_thread(services.orders.backfill, run), response)


async def _answer(services: Services, asked: Asked, response: Response) -> RunCommandReply:
    await carried_out(services, asked.numbers, response)
    return await asyncio.to_thread(services.views.refreshed, asked.reply)
