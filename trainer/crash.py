"""A test aid: dies, or fails, at a named place, so that the tests of crashes need no luck.

`EVALFLEET_TRAINER_CRASH_AT=place:step[:how]`, with `how` one of `kill` (SIGKILL, the default), `term` (SIGTERM) and
`raise`; the variable is unset outside tests. Places: after_save, after_reserve, after_publish, after_dispatch,
in_step, in_export.
"""

from __future__ import annotations

import errno
import os
import signal

VARIABLE = "EVALFLEET_TRAINER_CRASH_AT"


class InjectedFault(OSError):
    """What `raise` raises: an OSError, as a full disk would be."""


def crash_point(place: str, step: int) -> None:
    """Crash here, if the environment says so."""
    parts = os.environ.get(VARIABLE, "").split(":")
    if parts[:2] != [place, str(step)]:
        return
    how = parts[2] if len(parts) > 2 else "kill"
    if how == "raise":
        raise InjectedFault(errno.ENOSPC, f"injected fault at {place}:{step}")
    os.kill(os.getpid(), signal.SIGTERM if how == "term" else signal.SIGKILL)
