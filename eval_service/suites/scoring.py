"""A bounded pool of processes that score samples. A scorer that raises, hangs or exits is that sample's error, and
nobody else's.

The processes are started when first needed, by exec and not by multiprocessing: a Ray worker is full of threads (so no
fork), and spawn would import its main module again. Threads do the blocking half, one a process, so the event loop
that awaits `score` is never held up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import Any

from eval_service.contract.errors import EvalfleetError
from eval_service.secrets_apart import without_secrets
from eval_service.suites.turns import SPARE, Caller, Turns

_CHUNK = 64
_START_TIMEOUT_S = 60.0
_MESSAGE_S = 60.0
_EXIT_S = 5.0
_END_TIMEOUT_S = 5.0
_MAX_UNTAKEN = 3
_RENDER_TIMEOUT_S = 10.0
_TOGETHER_GRACE_S = 2.0  # an async scorer is ended by its own loop first, which harms no other


class ScorerPoolFailed(EvalfleetError):
    """A scorer process can't be started, or the pool is closed: infrastructure's fault, no sample's."""

    code = "scorer_pool_failed"
    status = 500


@dataclass(frozen=True, slots=True)
class Score:
    """A finite value, or the error that there was in its place; `unparsed` as in `scorers.Unparsed`.

    `more` are the scores beside the one that counts, by name.
    """

    value: float | None
    error: str | None = None
    unparsed: bool = False
    more: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScorerCall:
    """A registered scorer, what it is called with beside output and answer, and its seconds a sample."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None  # the pool's

    @property
    def request(self) -> dict[str, Any]:
        """What a scorer's process is sent."""
        return {"what": "score", "scorer": self.name, "options": dict(self.options), "timeout_s": self.timeout_s}


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the snapshot's template has it, or the error that there was in its place."""

    text: str
    ids: tuple[int, ...] = ()
    error: str | None = None


_Pair = tuple[str, str]  # output, answer
_Replies = list[dict[str, Any]]


class ScorerPool:
    """At most `processes` scorers at once beside those that hang, `timeout_s` for each sample.

    Importing `modules` registers more scorers.
    """

    def __init__(self, processes: int, timeout_s: float, modules: Sequence[str] = ()) -> None:
        if processes < 1:
            raise ValueError(f"processes: {processes} would score nothing; use 1 or more")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s: {timeout_s} is no deadline; use seconds above 0")
        self._timeout_s = timeout_s
        self._modules = tuple(modules)
        self._processes = processes
        self._turns = Turns(processes)
        self._threads = ThreadPoolExecutor(processes + SPARE, thread_name_prefix="scorer")
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._all: set[_Process] = set()
        self._lock = threading.Lock()
        self._closed = False

    async def score(self, scorer: str | ScorerCall, outputs: Sequence[str], answers: Sequence[str]) -> list[Score]:
        """Score each output against the answer of the same place; the result has their order and length.

        Raises:
            ScorerPoolFailed: a process can't be started, or `close` was called.
        """
        call = scorer if isinstance(scorer, ScorerCall) else ScorerCall(scorer)
        replies = await self._run(call.request, list(zip(outputs, answers, strict=True)))
        return [Score(**{"value": None, **reply}) for reply in replies]

    async def render(self, options: Mapping[str, Any], conversations: Sequence[str]) -> list[Rendered]:
        """Render conversations (JSON) with a snapshot's template, see `chat.chat_options`.

        Raises:
            ScorerPoolFailed: as for `score`.
        """
        request = {"what": "render", "options": dict(options), "timeout_s": _RENDER_TIMEOUT_S}
        replies = await self._run(request, [(conversation, "") for conversation in conversations])
        return [Rendered(r.get("text", ""), tuple(r.get("ids", ())), r.get("error")) for r in replies]

    async def _run(self, request: dict[str, Any], pairs: list[_Pair]) -> _Replies:
        """One reply a pair, in their order."""
        chunks = [pairs[start : start + _CHUNK] for start in range(0, len(pairs), _CHUNK)]
        caller, left, found = Caller(), iter(enumerate(chunks)), dict[int, _Replies]()

        async def work() -> None:
            for number, chunk in left:
                found[number] = await self._job(caller, request, chunk)

        jobs = [asyncio.ensure_future(work()) for _ in chunks[: self._processes]]
        try:
            await asyncio.gather(*jobs)
        finally:
            caller.left = True
            for job in jobs:
                job.cancel()
        return [reply for number in range(len(chunks)) for reply in found[number]]

    async def _job(self, caller: Caller, request: dict[str, Any], chunk: list[_Pair]) -> _Replies:
        await self._turns.take(caller)
        loop = asyncio.get_running_loop()
        try:
            if self._closed:
                raise ScorerPoolFailed("the scorer pool is closed")
            work = self._threads.submit(self._chunk, caller, request, chunk)
        except BaseException:
            self._turns.give_back(caller)
            raise
        work.add_done_callback(lambda _: self._over(loop, caller))  # its thread may be at work when nobody waits
        return await asyncio.wrap_future(work)

    def _over(self, loop: asyncio.AbstractEventLoop, caller: Caller) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._turns.give_back, caller)

    def close(self) -> None:
        """End every process at once; what is being scored ends in ScorerPoolFailed."""
        with self._lock:
            self._closed = True
            for process in self._all:
                process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._all:
            process.end()
        self._all.clear()

    def _chunk(self, caller: Caller, request: dict[str, Any], pairs: list[_Pair]) -> _Replies:
        """Until all are answered, or nobody waits for them. What a process leaves unanswered when it ends is asked
        again: if it went in order, the first of them is the one that ended it; if they ran together, each goes by
        itself from then on.
        """
        replies: dict[int, dict[str, Any]] = {}
        untaken, alone = 0, False
        while left := [number for number in range(len(pairs)) if number not in replies]:
            if caller.left:
                raise ScorerPoolFailed("nobody waits for the scores any more")
            if untaken >= _MAX_UNTAKEN:
                raise ScorerPoolFailed(f"{untaken} scorer processes ended before they had read a sample")
            asked = left[:1] if alone else left
            process = self._take()
            try:
                found, ending = process.ask(request, [pairs[number] for number in asked], caller.heard)
            except BaseException:
                self._drop(process)
                raise
            untaken = 0 if found or ending else untaken + 1
            replies |= {asked[number]: reply for number, reply in found.items()}
            if ending is not None:
                in_order = list(found) == list(range(len(found))) and not process.together
                if in_order or len(asked) == 1:
                    replies[asked[len(found)]] = {"error": ending}
                else:
                    alone = True
            if process.alive and self._idle.qsize() < self._processes:
                self._idle.put(process)
            else:
                self._drop(process)
        return [replies[number] for number in range(len(pairs))]

    def _take(self) -> _Process:
        """An idle process, or a new one; there are never more of them than threads that ask."""
        with contextlib.suppress(queue.Empty):
            if not self._closed:
                return self._idle.get_nowait()
        with self._lock:
            if self._closed:
                raise ScorerPoolFailed("the scorer pool is closed")
            process = _Process(self._timeout_s, self._modules)
            self._all.add(process)
        try:
            process.await_ready()
        except ScorerPoolFailed:
            self._drop(process)
            raise
        return process

    def _drop(self, process: _Process) -> None:
        process.end()
        with self._lock:
            self._all.discard(process)


class _Process:
    """One scorer process and the socket to it."""

    def __init__(self, timeout_s: float, modules: tuple[str, ...]) -> None:
        self._timeout_s = timeout_s
        self._connection, theirs = Pipe()
        _bounded(self._connection.fileno())
        with theirs:
            command = [sys.executable, "-m", "eval_service.suites.scorer_worker", str(theirs.fileno()), str(timeout_s)]
            # A session of its own, so that what a scorer started ends with it.
            self._popen = subprocess.Popen(
                [*command, *modules],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**without_secrets(os.environ), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self.alive = True
        self.together = False  # what it was last asked runs all at once

    def await_ready(self) -> None:
        """Wait until it has imported what it needs.

        Raises:
            ScorerPoolFailed: it ended first, or took too long.
        """
        reply = self._reply(_START_TIMEOUT_S)
        if isinstance(reply, str):
            raise ScorerPoolFailed(f"a scorer process did not start: {reply}", hint="its own output says why")

    def ask(
        self, request: dict[str, Any], pairs: list[_Pair], heard: Callable[[], None]
    ) -> tuple[dict[int, dict[str, Any]], str | None]:
        """Replies by number, and how it ended if it did so before all were answered: then it is dead.

        Neither means that it had died before it could read them, which is no sample's fault.
        """
        found: dict[int, dict[str, Any]] = {}
        try:
            self._connection.send_bytes(json.dumps({**request, "samples": pairs}).encode())
        except OSError:
            self.alive = False
            return found, None
        taken = self._reply(_START_TIMEOUT_S)
        if isinstance(taken, str):
            return found, None
        self.together = bool(taken.get("together"))
        timeout_s = float(request["timeout_s"] or self._timeout_s)
        grace_s = _TOGETHER_GRACE_S if self.together else 0.0
        while len(found) < len(pairs):
            reply = self._reply(timeout_s, grace_s)
            if isinstance(reply, str):
                return found, reply
            found[reply.pop("number")] = reply
            heard()
        return found, None

    def kill(self) -> None:
        """End it and whatever it started, now."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it, reap it, close the socket."""
        self.alive = False
        self.kill()
        self._popen.wait(_END_TIMEOUT_S)
        self._connection.close()

    def _reply(self, timeout_s: float, grace_s: float = 0.0) -> dict[str, Any] | str:
        """The next reply; text says why there is none, and then the process is done for."""
        try:
            if self._connection.poll(timeout_s + grace_s):
                reply: dict[str, Any] = json.loads(self._connection.recv_bytes())
                return reply
        except (EOFError, OSError):
            self.alive = False
            return f"the scorer's process ended ({self._status()})"
        self.alive = False
        return f"no score within {timeout_s:g} s"

    def _status(self) -> int:
        """Of one that says nothing more; a scorer that has closed the socket may go on without it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._popen.wait(_EXIT_S)
        self.kill()
        return self._popen.wait(_END_TIMEOUT_S)


def _bounded(descriptor: int) -> None:
    """One that stops in the midst of a message, or does not take one, is as good as ended: EAGAIN says so in time."""
    seconds = struct.pack("ll", *divmod(int(_MESSAGE_S * 1e6), 10**6))
    with socket.socket(fileno=os.dup(descriptor)) as same:
        for bound in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            same.setsockopt(socket.SOL_SOCKET, bound, seconds)
