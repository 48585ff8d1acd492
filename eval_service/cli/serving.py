"""`evalfleet serve`: the service, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    fleet: Annotated[Path, typer.Option(help="The fleet file: service settings and groups of engines.")],
    suites: Annotated[Path, typer.Option(help="The suites file: what is asked of a snapshot.")],
    address: Annotated[
        str | None, typer.Option(help="Join the Ray cluster at this address instead of starting one.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Listen here rather than on the fleet file's host.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Listen here rather than on the fleet file's port.")
    ] = None,
) -> None:
    """Start Ray and the service, and serve until told to stop (Ctrl-C or SIGTERM)."""
    from eval_service.serve.launch import serve_forever

    serve_forever(fleet, suites, address=address, host=host, port=port)
