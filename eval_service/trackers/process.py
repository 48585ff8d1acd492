"""The parent's side of a worker: starts it with no more of the environment than it needs, and ends one that hangs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval_service.secrets_apart import without_secrets
from eval_service.trackers.config import Target, secret_names
from eval_service.trackers.courier import MOST_TIMEOUTS, Report
from eval_service.trackers.told import Item

_END_S = 5.0
_MAX_LOG_BYTES = 4 << 20


class Worker:
    """One receiver behind a process of its own, which is started when there is something to tell.

    Args:
        kind: one of `worker.SINKS`.
        log: what the library prints goes there.
        networks: private ones that a webhook's name may lead to.
    """

    def __init__(self, kind: str, target: Target, *, state_dir: Path, log: Path, networks: Sequence[str] = ()) -> None:
        config = target.model_dump(mode="json") | ({"networks": list(networks)} if kind == "webhook" else {})
        self._order = {"kind": kind, "config": config, "state_dir": str(state_dir)}
        self._names = secret_names(target)
        self._timeout_s = target.timeout_s
        self._log = log
        self._lock = threading.Lock()
        self._program: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of its process; None: it has none now."""
        return self._program.pid if self._program is not None else None

    def deliver(self, items: Sequence[Item]) -> Report:
        """See `courier.Receiver`. Each item has the time of one delivery, all of them no more than ten times that."""
        until = time.monotonic() + self._timeout_s * min(len(items), MOST_TIMEOUTS)
        try:
            answer = self._exchange(items, until)
        except TimeoutError:
            self._end()
            return Report(frozenset(), error=f"no answer within {self._timeout_s:g} s")
        except (OSError, ValueError) as exc:
            self._end()
            return Report(frozenset(), error=f"its process ended: {exc}")
        return Report(frozenset(answer["done"]), frozenset(answer["refused"]), answer["error"])

    def close(self) -> None:
        """End the process, from any thread; there is no other one after it."""
        self._closed = True
        self._end()

    # --- how

    def _exchange(self, items: Sequence[Item], until: float) -> dict[str, Any]:
        channel = self._open()
        channel.settimeout(max(until - time.monotonic(), 0.001))
        channel.sendall(json.dumps(list(items)).encode() + b"\n")
        data = bytearray()
        while not data.endswith(b"\n"):
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError
            channel.settimeout(left)
            part = channel.recv(1 << 16)
            if not part:
                raise OSError(f"see {self._log}")
            data += part
        answer: dict[str, Any] = json.loads(data)
        return answer

    def _open(self) -> socket.socket:
        with self._lock:
            if self._closed:
                raise OSError("it is closed")
            if self._channel is not None:
                return self._channel
            environment = without_secrets(os.environ)
            environment |= {name: os.environ[name] for name in self._names if name in os.environ}
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):
                if self._log.stat().st_size > _MAX_LOG_BYTES:
                    self._log.replace(self._log.with_suffix(".log.1"))
            ours, theirs = socket.socketpair()
            with contextlib.ExitStack() as unless_started:
                unless_started.callback(ours.close)
                self._program = self._started(theirs, environment)
                ours.sendall(json.dumps(self._order).encode() + b"\n")
                unless_started.pop_all()
            self._channel = ours
            return ours

    def _started(self, theirs: socket.socket, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with theirs, self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "eval_service.trackers.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=environment | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )

    def _end(self) -> None:
        with self._lock:
            program, channel = self._program, self._channel
            self._program = self._channel = None
            if channel is not None:
                channel.close()
        if program is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(program.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(_END_S)
