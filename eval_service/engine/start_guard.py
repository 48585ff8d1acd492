"""Ends a replica that hangs while it starts: Serve looks after one only once it has started. Standard library only.

A process of its own, since one that is stopped can't look after itself. It waits for the pipe to the replica to close,
which says that Serve looks now, or that the replica is dead; past its deadline it kills it, and Serve starts another.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

DEADLINE_S = 120.0


class StartGuard:
    """Armed when made, until `disarm` is called; that may be repeated."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._program: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(deadline_s)], stdin=subprocess.PIPE
        )

    def disarm(self) -> None:
        """It has started."""
        program, self._program = self._program, None
        if program is not None and program.stdin is not None:
            program.stdin.close()
            program.wait()


def main() -> None:
    """Guard the parent."""
    replica, deadline_s = int(sys.argv[1]), float(sys.argv[2])
    started, _, _ = select.select([0], [], [], deadline_s)
    if not started and os.getppid() == replica:
        os.kill(replica, signal.SIGKILL)


if __name__ == "__main__":
    main()
