"""`evalfleet doctor`: the admission checks on a directory, with no service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eval_service.cli import options


def doctor(
    snapshot: Annotated[Path, typer.Argument(metavar="SNAPSHOT", help="A snapshot's directory.")],
    as_json: options.Json = False,
) -> None:
    """Run the admission checks on a snapshot. Exit 0: an engine may load it; 1: it would be skipped, and why."""
    from eval_service.admission.doctor import examine, render

    examination = examine(snapshot)
    typer.echo(render(examination, as_json=as_json))
    raise typer.Exit(0 if examination.ok else 1)
