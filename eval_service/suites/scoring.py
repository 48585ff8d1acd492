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
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any

from eval_service.contract.errors import EvalfleetError

_CHUNK = 64
_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0
_MAX_UNTAKEN = 3


class ScorerPoolFailed(EvalfleetError):
    """A scorer process can't be started, or the pool is closed: infrastructure's fault, no sample's."""

    code = "scorer_pool_failed"
    status = 500


@dataclass(frozen=True, slots=True)
class Score:
    """A finite value, or the error that there was in its place; `unparsed` as in `scorers.Unparsed`."""

    value: float | None
    error: str | None = None
    unparsed: bool = False


_Pair = tuple[str, str]  # output, answer


class ScorerPool:
    """At most `processes` scorers at once, `timeout_s` for each sample. Importing `modules` registers more scorers."""

    def __init__(self, processes: int, timeout_s: float, modules: Sequence[str] = ()) -> None:
        if processes < 1:
            raise ValueError(f"processes: {processes} would score nothing; use 1 or more")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s: {timeout_s} is no deadline; use seconds above 0")
        self._timeout_s = timeout_s
        self._modules = tuple(modules)
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="scorer")
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._all: set[_Process] = set()
        self._lock = threading.Lock()
        self._closed = False

    async def score(self, scorer: str, outputs: Sequence[str], answers: Sequence[str]) -> list[Score]:
        """Score each output against the answer of the same place; the result has their order and length.

        Raises:
            ScorerPoolFailed: a process can't be started, or `close` was called.
        """
        pairs = list(zip(outputs, answers, strict=True))
        loop = asyncio.get_running_loop()
        chunks = (pairs[start : start + _CHUNK] for start in range(0, len(pairs), _CHUNK))
        if self._closed:
            raise ScorerPoolFailed("the scorer pool is closed")
        jobs = [loop.run_in_executor(self._threads, self._score_chunk, scorer, chunk) for chunk in chunks]
        return [score for scores in await asyncio.gather(*jobs) for score in scores]

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

    def _score_chunk(self, scorer: str, pairs: list[_Pair]) -> list[Score]:
        scores: list[Score] = []
        untaken = 0
        while len(scores) < len(pairs):
            if untaken >= _MAX_UNTAKEN:
                raise ScorerPoolFailed(f"{untaken} scorer processes ended before they had read a sample")
            process = self._take()
            found = process.score(scorer, pairs[len(scores) :])
            untaken = 0 if found else untaken + 1
            scores += found
            if process.alive:
                self._idle.put(process)
            else:
                self._drop(process)
        return scores

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
        with theirs:
            command = [sys.executable, "-m", "eval_service.suites.scorer_worker", str(theirs.fileno()), str(timeout_s)]
            # A session of its own, so that what a scorer started ends with it.
            self._popen = subprocess.Popen(
                [*command, *modules],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self.alive = True

    def await_ready(self) -> None:
        """Wait until it has imported what it needs.

        Raises:
            ScorerPoolFailed: it ended first, or took too long.
        """
        reply = self._reply(_START_TIMEOUT_S)
        if isinstance(reply, str):
            raise ScorerPoolFailed(f"a scorer process did not start: {reply}", hint="its own output says why")

    def score(self, scorer: str, pairs: list[_Pair]) -> list[Score]:
        """Score until the first sample that ends the process; fewer scores than pairs mean that it is dead.

        None at all mean that it had died before it could read them, which is no sample's fault.
        """
        scores: list[Score] = []
        try:
            self._connection.send_bytes(json.dumps({"scorer": scorer, "samples": pairs}).encode())
        except OSError:
            self.alive = False
            return scores
        if isinstance(self._reply(_START_TIMEOUT_S), str):
            return scores
        while self.alive and len(scores) < len(pairs):
            reply = self._reply(self._timeout_s)
            scores.append(Score(None, reply) if isinstance(reply, str) else Score(**{"value": None, **reply}))
        return scores

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

    def _reply(self, timeout_s: float) -> dict[str, Any] | str:
        """The next reply; text says why there is none, and then the process is done for."""
        try:
            if self._connection.poll(timeout_s):
                reply: dict[str, Any] = json.loads(self._connection.recv_bytes())
                return reply
        except (EOFError, OSError):
            self.alive = False
            return f"the scorer's process ended ({self._popen.wait(_END_TIMEOUT_S)})"
        self.alive = False
        return f"no score within {timeout_s:g} s"
