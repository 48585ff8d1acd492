"""`evalfleet drain`: wait until every point of a run has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from eval_service.cli import options
from eval_service.cli.output import counts, print_json, say
from eval_service.cli.progress import bar
from eval_service.contract.wire import OnTimeout, Receipt

TIME_IS_UP = 3
ENDED = ("done", "skipped", "failed", "cancelled")
LEFT = ("pending", "never_came", "deferred")


def drain(
    run: options.Run,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait.")] = 600.0,
    on_timeout: Annotated[
        OnTimeout, typer.Option(help="At the deadline: leave what is not done to go on, or abort it.")
    ] = OnTimeout.LEAVE,
    url: options.Url = options.DEFAULT_URL,
    as_json: options.Json = False,
) -> None:
    """Wait until every point of a run has ended. Exit 0: drained; 3: time is up."""
    with options.connect(url) as client, _watching(f"draining {run}", quiet=as_json) as seen:
        receipt = client.drain(run, timeout_s=timeout, on_timeout=on_timeout, on_progress=seen)
    print_json(receipt) if as_json else say(receipt_text(receipt))
    raise typer.Exit(0 if receipt.drained else TIME_IS_UP)


def receipt_text(receipt: Receipt) -> str:
    """What finished, and what did not and why."""
    sizes = {name: len(getattr(receipt, name)) for name in ENDED + LEFT}
    head = "drained" if receipt.drained else "time is up" if receipt.timed_out else "not drained"
    lines = [f"{head}: {counts(sizes)}"]
    for name in (*ENDED[1:], *LEFT):
        for point in getattr(receipt, name):
            why = ": ".join(part for part in (point.reason, point.detail) if part)
            lines.append(f"  step {point.step} {point.suite}: {name}{f' ({why})' if why else ''}")
    return "\n".join(lines)


@contextmanager
def _watching(title: str, *, quiet: bool) -> Iterator[Callable[[Receipt], None] | None]:
    if quiet:
        yield None
        return
    with bar(title) as advance:

        def seen(receipt: Receipt) -> None:
            ended = sum(len(getattr(receipt, name)) for name in ENDED)
            advance(ended, ended + len(receipt.pending))

        yield seen
