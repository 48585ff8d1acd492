"""The options that commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from eval_service.contract.client import EvalClient

DEFAULT_URL = "http://127.0.0.1:8700"

Url = Annotated[str, typer.Option("--url", envvar="EVALFLEET_URL", help="Where the service listens.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]


def connect(url: str) -> EvalClient:
    """A client of the service; tests put their own in its place."""
    return EvalClient(url)
