"""`evalfleet doctor`: the admission checks on a directory, with no service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eval_service.cli import options
from eval_service.cli.output import print_json


def doctor(
    snapshot: Annotated[Path, typer.Argument(metavar="SNAPSHOT", help="A snapshot's directory.")],
    as_json: options.Json = False,
) -> None:
    """Run the admission checks on a snapshot. Exit 0: it may be evaluated; 1: it would be skipped, and why."""
    from eval_service.admission import doctor as admission

    found = admission.examine(snapshot)
    print_json(admission.as_json(found)) if as_json else typer.echo(admission.render(found))
    raise typer.Exit(admission.exit_code(found))
