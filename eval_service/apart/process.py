"""A process apart, as its owner has it: started by exec, talked to over a socket, ended with its children."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any, BinaryIO

from eval_service.apart.child import end_all
from eval_service.secrets_apart import without_secrets

_LINE_BYTES = 16 << 20
_END_S = 5.0
_TAIL_BYTES = 2000


class Ended(Exception):
    """It has ended. `status` is its exit status, negative for a signal."""

    def __init__(self, status: int, said: str) -> None:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        super().__init__(f"its process {how}" + (f": {said}" if said else ""))
        self.status = status


class Apart:
    """One process that runs a module of ours. Use `start`."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: asyncio.subprocess.Process
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, module: str, log: Path) -> Apart:
        """Start `python -m module FD`; what it prints goes to the log."""
        apart, (ours, theirs) = cls(log), socket.socketpair()
        environment = {**without_secrets(os.environ), "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        async with contextlib.AsyncExitStack() as unless_started:  # as where its owner is cancelled meanwhile
            unless_started.callback(ours.close)
            await apart._exec(module, theirs, environment)
            unless_started.push_async_callback(apart._kill)
            apart._reader, apart._writer = await asyncio.open_connection(sock=ours, limit=_LINE_BYTES)
            unless_started.pop_all()
        return apart

    async def _exec(self, module: str, theirs: socket.socket, environment: dict[str, str]) -> None:
        with theirs, _appended(self._log) as output:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=environment,
            )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it is known to be gone, by whatever."""
        return self._process.returncode is not None or self._reader.at_eof()

    async def ask(self, **message: Any) -> None:
        """Send something; that it has ended shows in the next answer."""
        with contextlib.suppress(OSError):
            self._writer.write(json.dumps(message).encode() + b"\n")
            await self._writer.drain()

    async def answer(self) -> dict[str, Any]:
        """What it says next.

        Raises:
            Ended: it will say nothing more.
        """
        line = b""
        with contextlib.suppress(OSError):
            line = await self._reader.readline()
        if not line.endswith(b"\n"):
            await self.end()
            raise Ended(self._process.returncode or 0, self._tail())
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def dispose(self, timeout_s: float) -> None:
        """Let it clean up, for so long, and end it: also where whoever waits for that gives up."""
        try:
            await self.ask(do="dispose")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._process.wait()
        finally:
            await self.end()

    async def end(self) -> None:
        """Kill it and whatever it started, and reap it."""
        try:
            await self._kill()
        finally:
            self._writer.close()

    async def _kill(self) -> None:
        end_all(self.pid)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._process.wait()

    def _tail(self) -> str:
        """The last line of what it printed."""
        with contextlib.suppress(OSError):
            text = self._log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
            return (text.strip().splitlines() or [""])[-1][:300]
        return ""


def _appended(log: Path) -> BinaryIO:
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("ab")
