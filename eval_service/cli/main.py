"""The entry point: the commands, and the one place where an error becomes a line and an exit code.

Exit codes: 0 as asked; 1 a check failed; 2 usage or configuration; 3 a drain's time is up; 4 the service can't be
reached; 5 the service could not do it.
"""

from __future__ import annotations

import sys

import typer

from eval_service.cli import (
    chaosing,
    checking,
    commanding,
    comparing,
    demonstrating,
    doctoring,
    draining,
    endpointing,
    exporting,
    launching,
    ledgering,
    reading,
    serving,
    showing,
    topping,
    uploading,
    watching,
)
from eval_service.contract.errors import ConfigError, Conflict, EvalfleetError, InvalidRequest, NotFound, Unavailable

USAGE, UNREACHABLE, INTERNAL = 2, 4, 5

app = typer.Typer(
    name="evalfleet",
    help="Evaluates every checkpoint of a training run while the run goes on.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("serve")(serving.serve)
app.command("launch")(launching.launch)
app.command("status")(reading.status)
app.command("fleet")(reading.fleet)
app.command("runs")(reading.runs)
app.command("points")(reading.points)
app.command("show")(showing.show)
app.command("top")(topping.top)
app.command("upload")(uploading.upload)
app.command("samples")(reading.samples)
app.command("compare")(comparing.compare)
app.command("diff")(comparing.diff)
app.command("export")(exporting.export)
app.command("drain")(draining.drain)
app.command("retry")(commanding.retry)
app.command("cancel")(commanding.cancel)
app.command("backfill")(commanding.backfill)
app.command("hold")(commanding.hold)
app.command("release")(commanding.release)
app.command("pause")(commanding.pause)
app.command("resume")(commanding.resume)
app.command("delete")(commanding.delete)
app.command("scale")(commanding.scale)
app.command("endpoint")(endpointing.endpoint)
app.command("check")(checking.check)
app.command("watch")(watching.watch)
app.command("doctor")(doctoring.doctor)
app.command("demo")(demonstrating.demo)
app.command("chaos")(chaosing.chaos)
app.add_typer(ledgering.app, name="ledger")


def exit_code(error: EvalfleetError) -> int:
    """The exit code that an error ends the command with."""
    if isinstance(error, Unavailable):
        return UNREACHABLE
    if isinstance(error, ConfigError | InvalidRequest | NotFound | Conflict):
        return USAGE
    return INTERNAL


def main() -> None:
    """Run the command line; every error of ours is one line on stderr."""
    try:
        app(prog_name="evalfleet")
    except EvalfleetError as error:
        print(f"evalfleet: error: {error}", file=sys.stderr)
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
