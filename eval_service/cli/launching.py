"""`evalfleet launch`: the service and the trainer of one node, by one command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from eval_service.cli import options, output


def launch(
    config: Annotated[Path, typer.Option(help="The run file.")],
    fleet: Annotated[Path | None, typer.Option(help="The fleet file; default: fleet.toml beside the run file.")] = None,
    suites: Annotated[
        Path | None, typer.Option(help="The suites file; default: suites.toml beside the run file.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="section.key=value", help="Override a setting of the run file.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="The service's port; 0: a free one. Wins over the fleet file.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="Take the host to have so many GPUs; default: those that are visible.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print who gets which GPU and which points come, and end.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Start the service and the trainer on this node, and end both in order; the exit code is the trainer's."""
    from eval_service.launch.layout import visible_gpus
    from eval_service.launch.plan import Asked, as_text, make_plan
    from eval_service.launch.plan import as_json as plan_json

    host = visible_gpus(os.environ)
    if gpus is not None:
        host = host[:gpus] if gpus <= len(host) else tuple(str(number) for number in range(gpus))
    made = make_plan(Asked(config.resolve(), fleet, suites, tuple(set_ or ()), port, host))
    if as_json:
        output.print_json(plan_json(made))
    else:
        output.say(as_text(made))
    if not plan:
        from eval_service.launch.run import run_launch

        raise typer.Exit(run_launch(made))
