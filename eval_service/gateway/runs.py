"""`/runs`: make a run known, look at it, tell its progress."""

from __future__ import annotations

from fastapi import APIRouter

from eval_service.contract.wire import Progress, RunSpec, RunView
from eval_service.gateway.services import Given

routes = APIRouter(tags=["runs"])


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


@routes.post("/runs/{run}/progress", status_code=204)
def progress(run: str, told: Progress, services: Given) -> None:
    """The trainer's step, so that lag can be known."""
    services.intents.progress(run, told.step)
