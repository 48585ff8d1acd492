"""What the routes need, handed in once: the two sides of the ledger that a gateway has, and the waker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Annotated, TypeVar, cast

from fastapi import Depends, Request, Response

from eval_service.ledger.advising import Advisor
from eval_service.ledger.intents import Intents
from eval_service.ledger.orders import Orders
from eval_service.ledger.scaling import ScaleOrders
from eval_service.ledger.views import Views

LONG_POLL_S = 20.0
CARRY_OUT_S = 2.0  # how long an order waits for the controller before it answers 202
LOOK_S = 0.1  # how often a waiting request looks at the ledger
_T = TypeVar("_T")


class SharedLook:
    """Waits until things are over, by one look at the ledger for all who wait, however many those are.

    Args:
        over: which of some things are over; it blocks, and runs in a thread.
    """

    def __init__(self, over: Callable[[Collection[str]], Collection[str]]) -> None:
        self._over = over
        self._waiting: dict[asyncio.Future[None], str] = {}
        self._looking: asyncio.Task[None] | None = None

    async def wait(self, thing: str, wait_s: float) -> None:
        """Return when it is over, or when `wait_s` (at most `LONG_POLL_S`) have passed.

        Raises:
            EvalfleetError: what the look raised.
        """
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = thing
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look_on())
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(future, min(wait_s, LONG_POLL_S))
        finally:
            self._waiting.pop(future, None)

    async def _look_on(self) -> None:
        try:
            while self._waiting:
                await self._look()
                await asyncio.sleep(LOOK_S)
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


@dataclass(frozen=True)
class Services:
    """Handed to every route.

    `wake` tells the controller that there is something to do; it must not block, and may do nothing.
    """

    intents: Intents
    orders: Orders
    views: Views
    version: str
    wake: Callable[[], None]
    scaling: ScaleOrders
    drains: SharedLook = field(init=False)
    advisor: Advisor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "advisor", Advisor(self.views.database))
        object.__setattr__(self, "drains", SharedLook(self.views.drains_over))


def _services(request: Request) -> Services:
    return cast("Services", request.app.state.services)


Given = Annotated[Services, Depends(_services)]


async def carried_out(services: Services, numbers: Collection[int], response: Response) -> None:
    """Wake the controller and wait for it a little; 202 where it has not carried the commands out by then."""
    if not numbers:
        return
    services.wake()
    if not await poll_until(lambda: services.views.carried_out(numbers), bool, CARRY_OUT_S):
        response.status_code = 202


async def poll_until(look: Callable[[], _T], done: Callable[[_T], bool], wait_s: float) -> _T:
    """Look at the ledger, off the loop, until `done` or until `wait_s` (at most `LONG_POLL_S`) have passed."""
    loop = asyncio.get_running_loop()
    until = loop.time() + min(wait_s, LONG_POLL_S)
    while True:
        found = await asyncio.to_thread(look)
        left = until - loop.time()
        if done(found) or left <= 0:
            return found
        await asyncio.sleep(min(LOOK_S, left))
