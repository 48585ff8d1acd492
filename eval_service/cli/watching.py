"""`evalfleet watch`: every checkpoint that a trainer of any kind leaves in a directory becomes a point."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eval_service.cli import options
from eval_service.cli.draining import TIME_IS_UP
from eval_service.cli.output import columns, harmless, print_json, say
from eval_service.contract.errors import InvalidRequest, RateLimited, Unavailable
from eval_service.contract.names import check_run
from eval_service.waking import Wake

if TYPE_CHECKING:
    from eval_service.watch.watcher import Watcher

PATIENCE_S = 60.0  # how long `--once` goes on without a service


def watch(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Holds a directory for each checkpoint.")],
    run: Annotated[str, typer.Option(help="The run that the points are of; made if it is not known.")],
    suites: Annotated[str | None, typer.Option(help="Comma-separated; left out: those of the run.")] = None,
    steps: Annotated[str | None, typer.Option(help="Only these: 100,200 or 100:900:100 or 100: and so on.")] = None,
    marker: Annotated[str | None, typer.Option(help="A file that says that its directory is complete.")] = None,
    quiet: Annotated[
        float, typer.Option(min=0, help="Seconds without a change; without a marker this, and the checks.")
    ] = 30.0,
    pattern: Annotated[
        str | None, typer.Option(help=r"Of directory names; its group is the step, as in 'm-(\d+)'.")
    ] = None,
    model: Annotated[str, typer.Option(help="Where in each directory the model lies.")] = ".",
    root: Annotated[Path | None, typer.Option(help="Samples go to <root>/<run>/evals; left out: DIR.")] = None,
    max_in_flight: Annotated[int | None, typer.Option(min=1, help="Checkpoints handed over and not ended.")] = None,
    once: Annotated[bool, typer.Option("--once", help="End when all that is there has ended.")] = False,
    timeout: Annotated[float | None, typer.Option(min=0, help="End after so many seconds, with exit code 3.")] = None,
    poll: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 5.0,
    url: options.Url = options.DEFAULT_URL,
    as_json: options.Json = False,
) -> None:
    """Evaluate the checkpoints in a directory, old and new. Exit 0: all are on the curve; 1: there are gaps."""
    from eval_service.watch.completion import Rule
    from eval_service.watch.steps import compile_pattern, parse_steps
    from eval_service.watch.watcher import Asked, Watcher

    asked = Asked(
        directory=_directory(directory),
        run=check_run(run),
        rule=Rule(marker, quiet),
        steps=parse_steps(steps),
        pattern=compile_pattern(pattern),
        model=model,
        root=root.absolute() if root is not None else None,
        suites=tuple(part.strip() for part in suites.split(",") if part.strip()) if suites else (),
        max_in_flight=max_in_flight,
    )
    with options.connect(url) as client, _stop_asked() as stop:
        watcher = Watcher(asked, client, say=_say)
        in_time = _follow(watcher, once=once, timeout_s=timeout, poll_s=poll, stop=stop)
    raise typer.Exit(_report(watcher, in_time, as_json))


def _directory(directory: Path) -> Path:
    if not directory.is_dir():
        raise InvalidRequest(f"{directory} is no directory", field="DIR", hint="name the one that holds checkpoints")
    if (directory / "config.json").is_file():
        raise InvalidRequest(
            f"{directory} is itself a model's directory", field="DIR", hint=f"name the one above it: {directory.parent}"
        )
    return directory.absolute()


def _follow(watcher: Watcher, *, once: bool, timeout_s: float | None, poll_s: float, stop: _Stop) -> bool:
    """Turn until there is no more to do; tells whether that was before the deadline."""
    began = heard = time.monotonic()
    while True:
        answered = False
        try:
            watcher.turn()
            answered, heard = True, time.monotonic()
        except (Unavailable, RateLimited) as exc:
            _say(str(exc))
            if once and time.monotonic() - heard >= PATIENCE_S:
                raise
        except OSError as exc:
            _say(f"{watcher.asked.directory} can't be read: {exc.strerror}")
        if answered and (watcher.complete or (once and watcher.at_rest)):
            return True
        if timeout_s is not None and time.monotonic() - began >= timeout_s:
            return False
        if stop.wait(poll_s):
            return True


def _report(watcher: Watcher, in_time: bool, as_json: bool) -> int:
    from eval_service.watch.watcher import gaps

    rows = watcher.coverage()
    missing = gaps(rows)
    expected, done = len(rows), sum(row.done for row in rows)
    if as_json:
        print_json(
            {"ok": not missing, "expected": expected, "done": done, "gaps": missing, "points": [*map(asdict, rows)]}
        )
    else:
        table = [[row.step, row.suite, row.directory, row.state, row.score] for row in rows]
        lines = [columns("step suite directory state score", table)] if rows else []
        lines += [f"{done} of {expected} points are done", *(f"GAP: {gap}" for gap in missing)]
        if not rows:
            lines.append(f"no checkpoint was seen in {watcher.asked.directory}; see --pattern")
        say("\n".join(lines))
    if not in_time:
        return TIME_IS_UP
    return 1 if missing or not rows else 0


def _say(line: str) -> None:
    print(f"evalfleet watch: {harmless(line)}", file=sys.stderr, flush=True)


class _Stop:
    """Whether the watch was asked to end."""

    def __init__(self) -> None:
        self.asked = False
        self._wake = Wake()

    def ask(self) -> None:
        """From a signal's handler."""
        self.asked = True
        self._wake.ring()

    def wait(self, seconds: float) -> bool:
        """Wait, or until it is asked; whether it was."""
        if not self.asked:
            self._wake.wait(seconds)
        return self.asked


@contextmanager
def _stop_asked() -> Iterator[_Stop]:
    """The first SIGINT or SIGTERM ends the watch with its report; a second one ends it at once."""
    stop = _Stop()
    before: dict[signal.Signals, Callable[..., object] | int | None] = {}

    def handle(number: int, _: object) -> None:
        if stop.asked:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        stop.ask()

    with suppress(ValueError):  # not the main thread: whoever runs it there stops it otherwise
        for each in (signal.SIGINT, signal.SIGTERM):
            before[each] = signal.signal(each, handle)
    try:
        yield stop
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
