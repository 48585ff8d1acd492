"""`evalfleet ledger`: what an operator does to the ledger itself, without the service."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from eval_service.cli import options
from eval_service.cli.output import print_json, say

Fleet = Annotated[Path, typer.Option(help="The fleet file, which says where the ledger is.")]
app = typer.Typer(help="Look at the ledger, copy it, bring it up to date.", no_args_is_help=True)


@app.command("show")
def show(fleet: Fleet, as_json: options.Json = False) -> None:
    """Tell where the ledger is, its schema, and what it holds; nothing is changed."""
    from eval_service.ledger.upkeep import survey

    found = survey(_url(fleet))
    if as_json:
        print_json(asdict(found))
        return
    seen = "never" if found.controller_at is None else datetime.fromtimestamp(found.controller_at, UTC).isoformat()
    schema = "there is none yet" if found.schema is None else f"{found.schema} (this version writes {found.newest})"
    say(f"ledger      {found.url}\nschema      {schema}\nepoch       {found.epoch}\ncontroller  {seen}")
    say(f"runs        {found.runs}\npoints      {found.points}")


@app.command("backup")
def backup(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="The copy; it must not be there yet.")],
    fleet: Fleet,
    as_json: options.Json = False,
) -> None:
    """Copy the ledger as it is at one moment, while the service goes on."""
    from eval_service.ledger.upkeep import backup as copy

    size_bytes = copy(_url(fleet), target)
    told = {"file": str(target.absolute()), "size_bytes": size_bytes}
    print_json(told) if as_json else say(f"{target}: {size_bytes} bytes")


@app.command("migrate")
def migrate(fleet: Fleet, as_json: options.Json = False) -> None:
    """Make the ledger, or bring one of an older version up to date, as `serve` does when it starts."""
    from eval_service.ledger.database import Database
    from eval_service.ledger.upkeep import survey

    before = survey(_url(fleet)).schema
    Database(_url(fleet)).close()
    after = survey(_url(fleet)).schema
    if as_json:
        print_json({"before": before, "after": after})
    else:
        say(f"schema {'none' if before is None else before} -> {after}")


def _url(fleet: Path) -> str:
    from eval_service.fleet_config import load_fleet
    from eval_service.serve.settings import ledger_of

    return ledger_of(load_fleet(fleet))
