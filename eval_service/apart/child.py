"""The inside of a process apart: lines of JSON over the socket that it was given.

Where the other end closes, the parent has died: this process ends with all that it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import threading
from typing import Any

import psutil


class Parent:
    """The other end of the socket."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._asked: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="parent", daemon=True).start()

    def tell(self, **message: Any) -> None:
        """Say something; from any thread."""
        with self._lock:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def asked(self) -> dict[str, Any]:
        """What is asked next; waits for as long as the parent lives."""
        return self._asked.get()

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                self._asked.put(json.loads(line))
        end_all(os.getpid())


def end_all(pid: int) -> None:
    """Kill a process, what descends from it, and its group."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(pid).children(recursive=True)
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
