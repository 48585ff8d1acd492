"""Somebody who talks to checkpoints through the proxy all the while, and writes down what each answer says that it is.

One point at a time: one that is done is asked to be served for some seconds, and is asked until it is refused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx

from eval_service.chaos.records import Records
from eval_service.contract.client import EvalClient
from eval_service.contract.errors import EvalfleetError

SERVED_S = 8.0
LAST_S = 60.0  # within that the proxy serves again when all faults are over
_PAUSE_S = 4.0
_ASK_S = 0.2
_ANSWER_S = 6.0
_PROMPT = "served"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the proxy's below 300, and the `weight_version` that the proxy gave it."""

    point: str
    prompt: str
    text: str
    label: str


@dataclass(slots=True)
class Told:
    """What became of what was asked. `silent`: why the last serving, after all faults, answered nothing."""

    answers: list[Answer] = field(default_factory=list)
    refused: int = 0
    silent: str | None = None


@dataclass(slots=True)
class Patron:
    """A thread that asks; `ask_last` and `end` are called by whoever started it."""

    url: str
    records: Records
    prompts: list[str]
    told: Told = field(default_factory=Told)
    _numbers: Any = field(default_factory=count)
    _ending: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def started(self) -> bool:
        """Whether it ever asked."""
        return self._thread is not None

    def start(self) -> None:
        """Begin."""
        self._thread = threading.Thread(target=self._live, name="patron", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ask no more."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(SERVED_S + 4 * _ANSWER_S)

    def ask_last(self) -> None:
        """One more serving, which has to be answered now that nothing is done to the service any more."""
        self.end()
        self.told.silent = "no point was left to be served"
        until = time.monotonic() + LAST_S
        with EvalClient(self.url, timeout_s=_ANSWER_S) as client, httpx.Client(timeout=_ANSWER_S) as http:
            while self.told.silent is not None and time.monotonic() < until:
                self._serve(client, http, lambda: self.told.silent is None)
                time.sleep(_ASK_S)

    def _live(self) -> None:
        with EvalClient(self.url, timeout_s=_ANSWER_S) as client, httpx.Client(timeout=_ANSWER_S) as http:
            while not self._ending.wait(_PAUSE_S):
                self._serve(client, http, self._ending.is_set)

    def _serve(self, client: EvalClient, http: httpx.Client, enough: Callable[[], bool]) -> None:
        until = time.monotonic() + SERVED_S + _PAUSE_S  # some of it beyond its end
        point = self.records.newest_done()
        if point is None:
            return
        try:
            view = client.serve(point, for_s=SERVED_S)
            while not enough() and time.monotonic() < until:
                self._ask(http, point, view.url)
                time.sleep(_ASK_S)
        except EvalfleetError as exc:  # the API is away, or the snapshot is gone by now
            self.told.silent = str(exc)
        with suppress(EvalfleetError):
            client.end_serving(point)

    def _ask(self, http: httpx.Client, point: str, url: str) -> None:
        number = next(self._numbers)
        prompt = self.prompts[number % len(self.prompts)] if number % 2 else f"{_PROMPT} {number}?"
        body = {"text": prompt, "sampling_params": {"max_new_tokens": 8}}
        try:
            reply = http.post(f"{url}/generate", json=body)
        except httpx.HTTPError as exc:
            self.told.silent = self.told.silent and f"{type(exc).__name__}: {exc}"
            return
        if reply.status_code >= 300:
            self.told.refused += 1
            self.told.silent = self.told.silent and f"{reply.status_code} {reply.text[:200]}"
            return
        text, label = reply.json()["text"], reply.headers.get("X-Router-Weights", "")
        self.told.answers.append(Answer(point, prompt, text, label))
        self.told.silent = None
