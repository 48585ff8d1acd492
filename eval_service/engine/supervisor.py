"""Owns one server's process group, so that no death leaves an orphan. Standard library only; it starts in 30 ms.

The first line of standard input is the order (JSON: command, env, boot, log, max_log_bytes, scratch, grace_s); then
the pipe stays open for as long as the replica lives. A line `ready` says that the server has made what shared memory it
will make. When the pipe closes, or on SIGTERM, the server's group gets SIGTERM, after `grace_s` SIGKILL, and so does
everything that descends from it. The server itself dies with this process (PR_SET_PDEATHSIG). Standard output tells, as
JSON lines: {"event": "started", "pid": N}, {"event": "exited", "code": N}.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_TIMEOUT_S = 20.0
_LOCK = ".lock"  # of scratch.py
_SHARED_MEMORY = "/dev/shm/sgl"
_LOG_LOOK_S = 5.0


def main() -> int:
    """Start the server of the order and stay until it has ended."""
    order = json.loads(_read_line())
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake, waker = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ending: list[bool] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.append(True))
    server = _start(order, libc)
    _tell(event="started", pid=server)
    code, leftovers = _watch(server, wake, ending, order)
    if code is None:
        code = _end(server, order["grace_s"])
    _kill_descendants(server)
    for path in leftovers:
        _unlink(path)
    _remove(order["scratch"])
    _tell(event="exited", code=code)
    return 0


def _remove(place: str) -> None:
    """As eval_service/scratch.py: the lock's file goes last, so what a kill interrupts can be collected."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(place)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _LOCK:
                _unlink(entry.path)
        if os.listdir(place) in ([], [_LOCK]):
            shutil.rmtree(place)


def _read_line() -> str:
    """The first line of standard input, read without buffering what follows."""
    data = bytearray()
    while not data.endswith(b"\n"):
        chunk = os.read(0, 1)
        if not chunk:
            sys.exit(0)
        data += chunk
    return data.decode()


def _start(order: dict[str, Any], libc: ctypes.CDLL) -> int:
    parent = os.getpid()

    def own_session_dies_with_us() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    with open(order["log"], "ab") as log:
        child = subprocess.Popen(
            order["command"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=order["scratch"],
            env={**os.environ, **order["env"], "TMPDIR": order["scratch"]},
            start_new_session=True,
            preexec_fn=own_session_dies_with_us,  # noqa: PLW1509 - this program has one thread
        )
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(order["boot"].encode())
        child.stdin.close()
    child.returncode = 0  # reaped below, not by Popen
    return child.pid


def _bound_log(path: str, max_bytes: int) -> None:
    """The server appends to its log by itself: what is too long is copied aside and cut, which it need not know of."""
    with contextlib.suppress(OSError):
        if os.path.getsize(path) > max_bytes:
            shutil.copyfile(path, path + ".1")
            os.truncate(path, 0)


def _watch(server: int, wake: int, ending: list[bool], order: dict[str, Any]) -> tuple[int | None, set[str]]:
    """Wait until the server has ended (its exit code) or must end (None); and what shared memory it mapped."""
    mapped: set[str] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while True:
            code = _reap(server)
            if code is not None or ending:
                return code, mapped
            _bound_log(order["log"], order["max_log_bytes"])
            for key, _ in selector.select(_LOG_LOOK_S):
                data = os.read(key.fd, 4096)
                if key.fd == 0 and not data:
                    return None, mapped
                if key.fd == 0:
                    mapped |= _shared_memory([server, *_descendants()])


def _reap(server: int) -> int | None:
    """Collect every child that has ended; the server's exit code if it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == server:
                found = os.waitstatus_to_exitcode(status)
    return found


def _end(server: int, grace_s: float) -> int:
    """SIGTERM, then SIGKILL, to the server's group; its exit code."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_TIMEOUT_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server, number)
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            code = _reap(server)
            if code is not None:
                return code
            time.sleep(0.01)
    return -signal.SIGKILL


def _kill_descendants(server: int) -> None:
    """Kill whatever is left of the group, and what was orphaned to us, until nothing is."""
    until = time.monotonic() + _KILL_TIMEOUT_S
    while time.monotonic() < until:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(server, signal.SIGKILL)
        left = _descendants()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap(server)
        if not left:
            return
        time.sleep(0.01)


def _descendants() -> list[int]:
    """Pids below this process, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{entry}/stat") as file:
                children.setdefault(int(file.read().rsplit(")", 1)[1].split()[1]), []).append(int(entry))
    found: list[int] = []
    ahead = [os.getpid()]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += below
    return found


def _shared_memory(pids: list[int]) -> set[str]:
    """Files of SGLang's in shared memory that the processes have mapped; SIGKILL would leave them there."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as file:
            paths = (line.split(maxsplit=5)[-1].strip() for line in file if _SHARED_MEMORY in line)
            found |= {path for path in paths if path.startswith(_SHARED_MEMORY)}
    return found


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _tell(**fields: Any) -> None:
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(fields).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
