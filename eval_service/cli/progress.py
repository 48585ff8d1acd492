"""Progress of long work: a bar on a terminal, a plain line for each change elsewhere. Both go to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[float, float], None]  # done so far, of


@contextmanager
def bar(title: str, *, lines: bool = True) -> Iterator[Advance]:
    """A bar that is told how much is done, and of how much.

    Args:
        lines: say it in lines where there is no terminal; off for work that tells more by itself.
    """
    # While a bar is shown, what is printed to stdout goes above it, so stdout must be that terminal too.
    if not (sys.stderr.isatty() and sys.stdout.isatty()):
        yield _lines(title) if lines else lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    shape = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*shape, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _lines(title: str) -> Advance:
    last: tuple[float, float] | None = None

    def advance(done: float, total: float) -> None:
        nonlocal last
        if (done, total) != last:
            last = (done, total)
            print(f"{title}: {done:g} of {total:g}", file=sys.stderr, flush=True)

    return advance
