"""The options that commands share."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from eval_service.contract.client import EvalClient
from eval_service.contract.errors import EvalfleetError

DEFAULT_URL = "http://127.0.0.1:8700"

_COMPLETION_S = 2.0


def _run_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The service's runs, for a shell that completes; none where it can't be reached."""
    url = ctx.params.get("url") or os.environ.get("EVALFLEET_URL") or DEFAULT_URL
    try:
        with EvalClient(url, timeout_s=_COMPLETION_S) as client:
            return [run for run in client.status().runs if run.startswith(incomplete)]
    except EvalfleetError:
        return []


Url = Annotated[str, typer.Option("--url", envvar="EVALFLEET_URL", help="Where the service listens.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.", autocompletion=_run_names)]


def connect(url: str) -> EvalClient:
    """A client of the service; tests put their own in its place."""
    return EvalClient(url)
