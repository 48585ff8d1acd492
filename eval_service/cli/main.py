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
    options,
    reading,
    serving,
    watching,
)
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
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("serve", cls=options.Talking)(serving.serve)
app.command("launch", cls=options.Talking)(launching.launch)
app.command("status", cls=options.Talking)(reading.status)
app.command("fleet", cls=options.Talking)(reading.fleet)
app.command("runs", cls=options.Talking)(reading.runs)
app.command("points", cls=options.Talking)(reading.points)
app.command("samples", cls=options.Talking)(reading.samples)
app.command("compare", cls=options.Talking)(comparing.compare)
app.command("diff", cls=options.Talking)(comparing.diff)
app.command("export", cls=options.Talking)(exporting.export)
app.command("drain", cls=options.Talking)(draining.drain)
app.command("retry", cls=options.Talking)(commanding.retry)
app.command("cancel", cls=options.Talking)(commanding.cancel)
app.command("backfill", cls=options.Talking)(commanding.backfill)
app.command("hold", cls=options.Talking)(commanding.hold)
app.command("release", cls=options.Talking)(commanding.release)
app.command("pause", cls=options.Talking)(commanding.pause)
app.command("resume", cls=options.Talking)(commanding.resume)
app.command("delete", cls=options.Talking)(commanding.delete)
app.command("scale", cls=options.Talking)(commanding.scale)
app.command("endpoint", cls=options.Talking)(endpointing.endpoint)
app.command("check", cls=options.Talking)(checking.check)
app.command("watch", cls=options.Talking)(watching.watch)
app.command("doctor", cls=options.Talking)(doctoring.doctor)
app.command("demo", cls=options.Talking)(demonstrating.demo)
app.command("chaos", cls=options.Talking)(chaosing.chaos)


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
        app()
    except EvalfleetError as error:
        print(f"evalfleet: error: {error}", file=sys.stderr)
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
