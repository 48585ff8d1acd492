"""The replica's side of one server process: the supervisor, its pipe, and what it tells.

The write end of the supervisor's standard input is held here and nowhere else (it is not inherited): when this process
dies, however it dies, the pipe closes and the supervisor kills the server's group.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from eval_service.engine import supervisor
from eval_service.engine.errors import BootFailed
from eval_service.engine.grades import ServerPlan
from eval_service.scratch import Kind, Scratch, collect
from eval_service.secrets_apart import without_secrets

STOP_GRACE_S = 0.5  # an evaluation has no state to save, and SGLang takes 6 to 66 s over SIGTERM
MAX_LOG_BYTES = 16 << 20  # of one engine's log; what came before is kept once, beside it
MAX_LOGS = 40  # of former engines, in one directory
_STOP_TIMEOUT_S = 30.0
_START_TIMEOUT_S = 20.0
_SOCKET_PATH_BYTES = 107  # the most that Linux takes
_SOCKET_NAME = "/tmp01234567"  # as SGLang's are called, in its place for temporary files


def prune_logs(directory: Path) -> None:
    """Each replica's log has a name of its own: of those of former ones the newest are kept."""

    def age(path: Path) -> float:
        with contextlib.suppress(OSError):
            return -path.stat().st_mtime
        return 0.0

    for path in sorted(directory.glob("engine-*.log*"), key=age)[MAX_LOGS:]:
        path.unlink(missing_ok=True)


def _scratch() -> Scratch:
    """Where a server's temporary files and sockets are to lie."""
    made = Scratch.make(Kind.ENGINE)
    over = len(os.fsencode(made.path)) + len(_SOCKET_NAME) - _SOCKET_PATH_BYTES
    if over <= 0:
        return made
    made.remove()
    where = made.path.parent
    raise BootFailed(f"TMPDIR: {where} is {over} bytes too long for the server's sockets: set a shorter one")


class ServerProcess:
    """One boot of a server. Make it with `start`; `exited` is set once its group is gone (or must be taken to be)."""

    def __init__(self, program: subprocess.Popen[bytes], scratch: Scratch) -> None:
        self.exited = asyncio.Event()
        self.exit_code: int | None = None
        self.server_pid: int | None = None
        self.supervisor_pid: int | None = program.pid
        self._supervisor = program
        self._scratch = scratch
        self._started = asyncio.Event()
        self._told_end = False
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, plan: ServerPlan, *, log: Path, grace_s: float = STOP_GRACE_S) -> ServerProcess:
        """Start a supervisor and, through it, the server; return once the server's process is there.

        Raises:
            BootFailed: the supervisor ended before it told of a server, or no socket of the server's could be named.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        prune_logs(log.parent)
        scratch = _scratch()
        collect()
        program = subprocess.Popen(  # noqa: ASYNC220 - asyncio's own needs a child watcher, which Serve's loops lack
            [sys.executable, "-I", "-S", supervisor.__file__],  # alone: it imports nothing that has to be found
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd=scratch.path,
            env=without_secrets(os.environ),
            pass_fds=(scratch.lock,),
        )
        process = cls(program, scratch)
        order = {
            "command": list(plan.command),
            "env": dict(plan.env),
            "boot": plan.boot,
            "log": str(log.resolve()),
            "scratch": str(scratch.path),
            "max_log_bytes": MAX_LOG_BYTES,
            "grace_s": grace_s,
        }
        try:
            process._write(json.dumps(order).encode() + b"\n")
            async with asyncio.timeout(_START_TIMEOUT_S):
                await process._started.wait()
        except (OSError, TimeoutError) as exc:
            await process.stop()
            raise BootFailed("the supervisor did not start") from exc
        except BaseException:
            await process.stop()
            raise
        if process.server_pid is None:
            await process.stop()
            raise BootFailed("the supervisor ended before it started a server")
        return process

    def ready(self) -> None:
        """Tell the supervisor that the server is up, so that it notes what to clean after it."""
        with contextlib.suppress(OSError):
            self._write(b"ready\n")

    async def stop(self) -> None:
        """End the server's group and wait for it; everything is bounded."""
        with contextlib.suppress(OSError):
            if self._supervisor.stdin is not None:
                self._supervisor.stdin.close()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self.exited.wait()
        except TimeoutError:
            self._supervisor.kill()
        await self._reader

    def _write(self, data: bytes) -> None:
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.write(data)
        self._supervisor.stdin.flush()

    async def _read(self) -> None:
        """Follow the supervisor's lines to their end, which is its own end."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._supervisor.stdout
        )
        try:
            async for line in reader:
                self._hear(json.loads(line))
        finally:
            transport.close()
            await asyncio.to_thread(self._supervisor.wait)
            self._clean()
            self._started.set()
            self.exited.set()

    def _hear(self, event: dict[str, object]) -> None:
        if event["event"] == "started":
            self.server_pid = int(str(event["pid"]))
            self._started.set()
        else:
            self._told_end = True
            self.exit_code = int(str(event["code"]))

    def _clean(self) -> None:
        """The supervisor is gone; where it could not say that the server is, the group is killed from here."""
        if self.server_pid is not None and not self._told_end:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.server_pid, signal.SIGKILL)
        if self._supervisor.stdin is not None:
            with contextlib.suppress(OSError):
                self._supervisor.stdin.close()
        self._scratch.remove()
