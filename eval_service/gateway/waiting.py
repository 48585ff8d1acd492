"""How many requests wait at the price of one: the ledger's number of changes is watched, and one look serves all."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Collection

from eval_service.contract.errors import EvalfleetError

LONG_POLL_S = 20.0
WATCH_S = 0.05  # how often the ledger is asked whether it changed, while somebody waits
LOOK_S = 0.1  # how long one look is good for, however often the ledger changes
AGAIN_S = 0.5  # what only time changes (a deadline) is seen so much later


def spread(wait_s: float) -> float:
    """Between half and all of it: who began together would come back together, each time, and hold up all others."""
    return wait_s * random.uniform(0.5, 1.0)


class Watch:
    """Tells everybody who waits that the ledger was written to.

    Args:
        changes: a number that differs from the last one if it was; it runs in a thread.
    """

    def __init__(self, changes: Callable[[], int]) -> None:
        self._changes = changes
        self._number: int | None = None
        self._turn = 0
        self._waiting: set[asyncio.Future[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    @property
    def turn(self) -> int:
        """Take it before the ledger is read, and wait `beyond` it after: no change in between is missed."""
        return self._turn

    def poke(self) -> None:
        """Let those who wait look again soon, as if it had changed."""
        self._number = None

    async def beyond(self, turn: int, wait_s: float) -> None:
        """Return when it has changed since `turn`, or when `wait_s` have passed."""
        if self._turn != turn:
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch_on())
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await future
        finally:
            self._waiting.discard(future)

    async def _watch_on(self) -> None:
        try:
            while self._waiting:
                await self._ask()
                await asyncio.sleep(WATCH_S)
        finally:
            self._watching = None

    async def _ask(self) -> None:
        try:
            number = await asyncio.to_thread(self._changes)
        except EvalfleetError:
            number = None  # whoever looks finds out what is wrong
        if number is not None and number == self._number:
            return
        self._number = number
        self._turn += 1
        for future in self._waiting:
            if not future.done():
                future.set_result(None)


class SharedLook:
    """Waits until things are over, by one look at the ledger for all who wait, however many those are.

    Args:
        over: which of some things are over; it blocks, and runs in a thread.
    """

    def __init__(self, over: Callable[[Collection[str]], Collection[str]], watch: Watch) -> None:
        self._over = over
        self._watch = watch
        self._waiting: dict[asyncio.Future[None], str] = {}
        self._looking: asyncio.Task[None] | None = None

    async def wait(self, thing: str, wait_s: float) -> None:
        """Return when it is over, or when `wait_s` (at most `LONG_POLL_S`) have passed.

        Raises:
            EvalfleetError: what the look raised.
        """
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = thing
        self._watch.poke()
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look_on())
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, LONG_POLL_S)):
                    await future
        finally:
            self._waiting.pop(future, None)

    async def _look_on(self) -> None:
        try:
            while self._waiting:
                turn = self._watch.turn
                await self._look()
                await asyncio.sleep(LOOK_S)
                if self._waiting:
                    await self._watch.beyond(turn, AGAIN_S)
        finally:
            self._looking = None

    async def _look(self) -> None:
        asked = dict(self._waiting)
        try:
            found = set(await asyncio.to_thread(self._over, set(asked.values())))
        except Exception as exc:  # noqa: BLE001 - raised in everybody who waits
            for future in asked:
                if not future.done():
                    future.set_exception(exc)
            return
        for future, thing in asked.items():
            if thing in found and not future.done():
                future.set_result(None)
