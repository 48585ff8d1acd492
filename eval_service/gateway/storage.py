"""Calls to file systems that may hang: in threads of their own, few enough, with a deadline each.

A call that hangs keeps its thread for as long as it hangs, and nothing else: no other request, no ledger call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

from eval_service.contract.errors import Unavailable
from eval_service.controller.db import DaemonThreads

MOST_CALLS = 16
ANSWER_S = 5.0
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Storage:
    """Runs calls that touch snapshots or results."""

    def __init__(self, *, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self._threads = DaemonThreads("storage")
        self._busy = 0

    async def __call__(self, call: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run one call and return what it returns.

        Raises:
            Unavailable: it did not answer in time, or too many others don't answer.
        """
        if self._busy >= MOST_CALLS:
            raise _hangs(f"{MOST_CALLS} calls wait for it")
        self._busy += 1
        running = asyncio.ensure_future(self._threads.run(partial(call, *args, **kwargs)))
        running.add_done_callback(self._ended)
        done, _ = await asyncio.wait([running], timeout=self._answer_s)
        if not done:
            raise _hangs(f"a call took longer than {self._answer_s:g} s")
        return running.result()

    def _ended(self, running: asyncio.Future[Any]) -> None:
        self._busy -= 1
        if not running.cancelled():
            running.exception()  # of a call that nobody waits for any longer


def _hangs(why: str) -> Unavailable:
    return Unavailable(f"the storage does not answer: {why}", field="storage", hint="ask again once it does")
