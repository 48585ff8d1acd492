"""The end of `evalfleet serve`: in order where Ray lets it, and whole where it doesn't.

A signal may reach more than this process: all of its process group, of a job step, of a container. Ray is gone then at
once, and Ray's own way out waits a minute for it, ends this process where it stands and leaves its directory. A thread
looks on, beside whatever this process waits for.

Invariant: once this process has ended, other than by SIGKILL, nothing runs that it started and its directory is gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import psutil

from eval_service import orphans
from eval_service.contract.errors import Unavailable
from eval_service.scratch import Scratch, collect

RAY_DIED = 4  # as the command line gives `Unavailable`
GRACE_S = 1.0  # the signal that has ended Ray may be on its way to this process
SAME_SIGNAL_S = 2.0  # what of Ray has ended so shortly before this process was told to, was told the same
JOINED_GRACE_S = 10.0  # a cluster may start its head anew
LEAVING_S = 15.0
_IDLE_S, _LOOK_S = 1.0, 0.2  # between looks, before and after it is told to stop
_LINGER_S = 10.0
_PROBE_S = 1.0
_VITAL = ("gcs_server", "raylet")


class Ending:
    """`begin` before Ray is started, `own` or `joined` after it, `leave` before it is shut down, `close` at last.

    Args:
        stop_s: from the order to stop until Ray must be about to be shut down.
    """

    def __init__(
        self,
        stop: threading.Event,
        scratch: Scratch | None,
        *,
        stop_s: float,
        leave_with: Callable[[int], object] = os._exit,
    ) -> None:
        self._stop = stop
        self._scratch = scratch
        self._stop_s = stop_s
        self._leave_with = leave_with
        self._ray: list[psutil.Process] = []  # what Ray started here itself
        self._lives: Callable[[], bool] | None = None
        self._living = 0  # of these
        self._died_at = float("-inf")  # when one of them was last seen to have ended
        self._stop_at: float | None = None
        self._grace_s = GRACE_S
        self._gone_at: float | None = None
        self._until = float("inf")
        self._leaving = False
        self._closing = threading.Lock()

    def begin(self) -> None:
        """Look on from now on, from a thread of its own."""
        orphans.adopt()
        threading.Thread(target=self._look_on, name="ending", daemon=True).start()

    def own(self, gcs: str) -> None:
        """Ray has been started by this process: it lives as long as each of its vital processes.

        Args:
            gcs: where its GCS listens (host:port). One that was told to end may take its time, and answers nobody.
        """
        self._ray = psutil.Process().children()
        self._living = len(self._ray)
        vital = [process for process in self._ray if process.name() in _VITAL]
        self._lives = lambda: all(map(orphans.alive, vital)) and (not self._stop.is_set() or answers(gcs))

    def joined(self, gcs: str) -> None:
        """Ray is others': once this process is to end, it waits for a cluster that answers at `gcs`."""
        self._grace_s = JOINED_GRACE_S
        self._lives = lambda: not self._stop.is_set() or answers(gcs)

    def ray_lives(self) -> bool:
        """Whether it is there, as far as this process can see."""
        return self._lives is None or self._lives()

    def leave(self) -> None:
        """Ray is shut down from now on, by this process; one that has died before may be waited for in vain."""
        if self.ray_lives():
            self._until = time.monotonic() + LEAVING_S
            self._leaving = True

    def close(self) -> None:
        """Ray has been shut down, or will never be: end what it has left, and remove its directory."""
        with self._closing:
            orphans.end_below(_LINGER_S)
            if self._scratch is not None:
                self._scratch.remove()
                self._scratch = None
            collect()  # what engines left that had to be killed

    def look(self, now: float) -> bool:
        """Look once, `now` being monotonic; whether this process had to be ended."""
        if self._lives is not None:
            orphans.bury({process.pid for process in self._ray})
        if not self._leaving:
            if self._stop_at is None and self._stop.is_set():
                self._stop_at, self._until = now, now + self._stop_s
            self._gone_at = (self._gone_at or now) if self._is_gone(now) else None
        gone = self._gone_at is not None and now - self._gone_at >= self._grace_s
        if gone or now >= self._until:
            self._end()
            return True
        return False

    def _is_gone(self, now: float) -> bool:
        """Whether Ray is gone, or going: its helpers die at once of a signal that takes the raylet ten seconds."""
        living = sum(map(orphans.alive, self._ray))
        if living < self._living:
            self._living, self._died_at = living, now
        return not self.ray_lives() or (self._stop_at is not None and self._died_at > self._stop_at - SAME_SIGNAL_S)

    def _look_on(self) -> None:
        while not self.look(time.monotonic()):
            if self._stop.wait(_IDLE_S):
                time.sleep(_LOOK_S)

    def _end(self) -> None:
        """End everything, and this process, without Ray's help."""
        self.close()
        if not self._stop.is_set():
            print(f"evalfleet: error: {ray_died()}", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        self._leave_with(0 if self._stop.is_set() else RAY_DIED)


def ray_died() -> Unavailable:
    """What is told where there is no Ray any more."""
    return Unavailable("Ray has died, and the service with it", hint="start it again: what was queued goes on")


def answers(address: str) -> bool:
    """Whether anybody listens at `host:port`."""
    at = urlsplit(f"//{address}")
    try:
        with socket.create_connection((at.hostname or "", at.port or 0), _PROBE_S):
            return True
    except OSError:
        return False
