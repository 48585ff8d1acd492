"""What the routes need, handed in once: the two sides of the ledger that a gateway has, and the waker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar, cast

from fastapi import Depends, Request

from eval_service.ledger.intents import Intents
from eval_service.ledger.views import Views

LONG_POLL_S = 20.0
LOOK_S = 0.1  # how often a waiting request looks at the ledger
_T = TypeVar("_T")


@dataclass(frozen=True)
class Services:
    """Handed to every route.

    `wake` tells the controller that there is something to do; it must not block, and may do nothing.
    """

    intents: Intents
    views: Views
    version: str
    wake: Callable[[], None]


def _services(request: Request) -> Services:
    return cast("Services", request.app.state.services)


Given = Annotated[Services, Depends(_services)]


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
