"""Every event of a run, in order, as JSON lines: `{"seq", "time", "event", ...}`.

Invariants: a line is in the operating system's hands before the event's successor begins, so what a killed trainer did
can be read from it; `seq` goes on where an earlier launch ended; a full disk stops nothing, and what could not be
written goes with a later line; what a thread that was given up tells after `close` is nobody's fault, and is dropped.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


class StepLog:
    """Appends to one file; safe to use from several threads."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._seq = _last_seq(path)
        whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
        self._file = path.open("a", buffering=1)
        if not whole:  # a killed launch's last line; the next one must not be lost with it
            self._file.write("\n")

    def write(self, event: str, **fields: Any) -> None:
        """Append an event; fields must be JSON."""
        with self._lock:
            if self._file.closed:
                return
            self._seq += 1
            entry = {"seq": self._seq, "time": self._clock(), "event": event, **fields}
            with suppress(OSError):  # the file keeps it, and tries again with the next line
                self._file.write(json.dumps(entry) + "\n")

    def close(self) -> None:
        """Close the file."""
        with self._lock, suppress(OSError):
            self._file.close()


def read_steplog(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a log, oldest first; a last line cut short by a kill is left out."""
    entries: list[dict[str, Any]] = []
    if not path.exists():
        return entries
    for line in path.read_text().splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def _last_seq(path: Path) -> int:
    return max((int(entry["seq"]) for entry in read_steplog(path)), default=0)
