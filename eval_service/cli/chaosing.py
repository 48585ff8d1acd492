"""`evalfleet chaos`: the service on fake engines, through a seeded list of faults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eval_service.cli import options


def chaos(
    seed: Annotated[int, typer.Option(help="The same seed is the same list of faults.")] = 0,
    faults: Annotated[int, typer.Option(min=0, help="How many faults.")] = 40,
    kinds: Annotated[str, typer.Option(help="Only these kinds of fault, with commas between; empty: all.")] = "",
    engines: Annotated[int, typer.Option(min=1, help="How many fake engines.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Keep the ledger, logs and snapshots here.")] = None,
    as_json: options.Json = False,
) -> None:
    """Run the service on fake engines through kills, hangs and lies; exit 0 if every promise was kept."""
    from eval_service.chaos.faults import FaultKind
    from eval_service.chaos.run import ChaosOptions, run_chaos
    from eval_service.contract.errors import ConfigError

    try:
        wanted = tuple(FaultKind(name) for name in kinds.split(",") if name)
    except ValueError as exc:
        known = ", ".join(FaultKind)
        raise ConfigError(str(exc), field="--kinds", hint=f"there are {known}") from exc
    asked = ChaosOptions(seed=seed, faults=faults, out=out, engines=engines, kinds=wanted, as_json=as_json)
    raise typer.Exit(run_chaos(asked))
