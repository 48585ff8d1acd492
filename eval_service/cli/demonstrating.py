"""`evalfleet demo`: a model learns while every checkpoint is evaluated beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eval_service.cli import options


def demo(
    out: Annotated[Path, typer.Option(help="Where everything is written; a former demo's output is replaced.")] = Path(
        "demo-out"
    ),
    kill: Annotated[bool, typer.Option("--kill/--no-kill", help="Kill an engine while a point runs on it.")] = True,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The service's port; 0: a free one.")] = 0,
    as_json: options.Json = False,
) -> None:
    """Train a tiny model on this machine with every checkpoint evaluated beside it; exit 0 if all went as it should."""
    from eval_service.demo.plan import DemoOptions
    from eval_service.demo.run import run_demo

    raise typer.Exit(run_demo(DemoOptions(out=out, kill=kill, port=port, as_json=as_json)))
