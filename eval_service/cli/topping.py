"""`evalfleet top`: the service as it works, in a terminal. It asks once an interval, and outlives the service.

On a terminal the frame takes the whole screen; q or Ctrl-C ends it, and a new size is drawn at once. Without one (a
pipe, a log) frames are plain text, one after another. The terminal is left as it was, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer

from eval_service.cli import options
from eval_service.cli.frames import Frame, Looker, render
from eval_service.cli.output import print_json

_WIDTH = 160  # without a terminal, unless COLUMNS says otherwise
_OTHER_ROWS = 12  # of the screen: titles and headers
_TABLES = 4


def top(
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One frame, then end.")] = False,
    run: Annotated[str | None, typer.Option(help="Only this run's points.")] = None,
    url: options.Url = options.DEFAULT_URL,
    as_json: options.Json = False,
) -> None:
    """Show runs, points under way, engines, queue, lag and drains as they change; q ends it."""
    with options.connect(url) as client:
        looker = Looker(client, run)
        frame = looker.look()
        if as_json or once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            _print_frames(looker, frame, interval, once=once, as_json=as_json)
        else:
            _live(looker, frame, interval)


def _print_frames(looker: Looker, frame: Frame, interval: float, *, once: bool, as_json: bool) -> None:
    try:
        while True:
            _print(frame, as_json=as_json, alone=once)
            if once:
                return
            time.sleep(interval)
            frame = looker.look()
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # whoever read has enough; nothing is left to be flushed into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print(frame: Frame, *, as_json: bool, alone: bool) -> None:
    if as_json and alone:
        print_json(frame.as_json())
    elif as_json:  # a document a line
        print(json.dumps(frame.as_json()), flush=True)
    else:
        from rich.console import Console

        width = int(os.environ["COLUMNS"]) if os.environ.get("COLUMNS", "").isdecimal() else None
        width = width or (None if sys.stdout.isatty() else _WIDTH)
        Console(width=width, highlight=False).print(render(frame))
        sys.stdout.flush()


def _live(looker: Looker, frame: Frame, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    with _keys() as events, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(render(frame, max(1, (console.height - _OTHER_ROWS) // _TABLES)), refresh=True)
            until = time.monotonic() + interval
            ended = resized = False
            while not (ended or resized) and (left := until - time.monotonic()) > 0:
                ended, resized = _told(events, left)
            if ended:
                return
            if not resized:
                frame = looker.look()


def _told(events: socket.socket, timeout_s: float) -> tuple[bool, bool]:
    """Whether somebody wants to end it, and whether the terminal has another size; waits for either."""
    ready, _, _ = select.select([sys.stdin, events], [], [], timeout_s)
    if events in ready:
        events.recv(4096)
        return False, True
    if ready:
        typed = os.read(sys.stdin.fileno(), 64)
        return not typed or bool(set(typed) & set(b"qQ\x03\x04")), False
    return False, False


@contextlib.contextmanager
def _keys() -> Iterator[socket.socket]:
    """The terminal hands over each key as it is pressed; the socket tells of a new size. Both are undone."""
    import termios
    import tty

    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    reads, writes = socket.socketpair()
    reads.setblocking(False)
    writes.setblocking(False)

    # Written to by C at once: a handler in Python would run after the wait that it is to end, if it came just before.
    woken = signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
    handler = signal.signal(signal.SIGWINCH, lambda *_: None)
    try:
        tty.setcbreak(stdin)
        with contextlib.suppress(KeyboardInterrupt):
            yield reads
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
        signal.signal(signal.SIGWINCH, handler)
        signal.set_wakeup_fd(woken)
        reads.close()
        writes.close()
