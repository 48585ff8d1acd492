"""A test aid: dies, or fails, at a named place, so that the tests of crashes need no luck.

`EVALFLEET_TRAINER_CRASH_AT=place:step[:how]`, with `how` one of `kill` (SIGKILL, the default), `term` (SIGTERM) and
`raise`; the variable is unset outside tests. Places: after_save, after_reserve, after_publish, after_dispatch, in_step,
in_export, in_shard (an export's first file is written), in_save (behind: every part of a checkpoint is written, and
nothing has its name yet), and settled: in a step, once everything that was saved and exported before
it is there (so it is at after_save too).
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable

VARIABLE = "EVALFLEET_TRAINER_CRASH_AT"


class InjectedFault(OSError):
    """What `raise` raises: an OSError, as a full disk would be."""


def crash_point(place: str, step: int, *, first: Callable[[], object] | None = None) -> None:
    """Crash here, if the environment says so; then after `first` was called."""
    parts = os.environ.get(VARIABLE, "").split(":")
    if parts[:2] != [place, str(step)]:
        return
    if first is not None:
        first()
    how = parts[2] if len(parts) > 2 else "kill"
    if how == "raise":
        raise InjectedFault(errno.ENOSPC, f"injected fault at {place}:{step}")
    os.kill(os.getpid(), signal.SIGTERM if how == "term" else signal.SIGKILL)
