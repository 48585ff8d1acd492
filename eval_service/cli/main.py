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
    options,
    reading,
    serving,
    showing,
    topping,
    uploading,
    watching,
)
from eval_service.cli.output import harmless
from eval_service.contract.errors import (
    ConfigError,
    Conflict,
    EvalfleetError,
    Forbidden,
    InvalidRequest,
    NotFound,
    Unauthorized,
    Unavailable,
)

USAGE, UNREACHABLE, INTERNAL = 2, 4, 5

app = typer.Typer(
    name="evalfleet",
    help="Evaluates every checkpoint of a training run while the run goes on.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("serve")(options.talking(serving.serve))
app.command("launch")(options.talking(launching.launch))
app.command("status")(options.talking(reading.status))
app.command("fleet")(options.talking(reading.fleet))
app.command("runs")(options.talking(reading.runs))
app.command("points")(options.talking(reading.points))
app.command("show")(options.talking(showing.show))
app.command("top")(options.talking(topping.top))
app.command("upload")(options.talking(uploading.upload))
app.command("samples")(options.talking(reading.samples))
app.command("curve")(options.talking(comparing.curve))
app.command("compare")(options.talking(comparing.compare))
app.command("diff")(options.talking(comparing.diff))
app.command("export")(options.talking(exporting.export))
app.command("drain")(options.talking(draining.drain))
app.command("retry")(options.talking(commanding.retry))
app.command("cancel")(options.talking(commanding.cancel))
app.command("backfill")(options.talking(commanding.backfill))
app.command("hold")(options.talking(commanding.hold))
app.command("release")(options.talking(commanding.release))
app.command("pause")(options.talking(commanding.pause))
app.command("resume")(options.talking(commanding.resume))
app.command("delete")(options.talking(commanding.delete))
app.command("scale")(options.talking(commanding.scale))
app.command("endpoint")(options.talking(endpointing.endpoint))
app.command("check")(options.talking(checking.check))
app.command("watch")(options.talking(watching.watch))
app.command("doctor")(options.talking(doctoring.doctor))
app.command("demo")(options.talking(demonstrating.demo))
app.command("chaos")(options.talking(chaosing.chaos))
app.add_typer(ledgering.app, name="ledger")


def exit_code(error: EvalfleetError) -> int:
    """The exit code that an error ends the command with."""
    if isinstance(error, Unavailable):
        return UNREACHABLE
    if isinstance(error, ConfigError | InvalidRequest | NotFound | Conflict | Unauthorized | Forbidden):
        return USAGE
    return INTERNAL


def main() -> None:
    """Run the command line; every error of ours is one line on stderr."""
    try:
        app(prog_name="evalfleet")
    except EvalfleetError as error:
        print(f"evalfleet: error: {harmless(str(error))}", file=sys.stderr)
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
