"""What the routes need, handed in once: the two sides of the ledger that a gateway has, and the waker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, TypeVar, cast

from fastapi import Depends, Request, Response

from eval_service.ledger.intents import Intents
from eval_service.ledger.orders import Orders
from eval_service.ledger.views import Views

LONG_POLL_S = 20.0
CARRY_OUT_S = 2.0  # how long an order waits for the controller before it answers 202
LOOK_S = 0.1  # how often a waiting request looks at the ledger
_T = TypeVar("_T")


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
