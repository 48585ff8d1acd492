"""What the routes need, handed in once: the sides of the ledger that a gateway has, ways to wait, and the waker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, TypeVar, cast

from fastapi import Depends, Request, Response
from sqlalchemy import Connection

from eval_service.access.keyring import Access
from eval_service.fleet_config import GroupConfig
from eval_service.gateway.endpoint import Endpoint
from eval_service.gateway.feed import Feed
from eval_service.gateway.metrics import Metrics
from eval_service.gateway.storage import Storage
from eval_service.gateway.waiting import SharedLook, Watch
from eval_service.ledger.advising import Advisor
from eval_service.ledger.bounds import Bounds
from eval_service.ledger.changes import Changes
from eval_service.ledger.curves import Curves
from eval_service.ledger.database import Database
from eval_service.ledger.events import EventLog
from eval_service.ledger.grouped import GroupedWrites
from eval_service.ledger.intents import Intents
from eval_service.ledger.orders import Orders
from eval_service.ledger.scaling import ScaleOrders
from eval_service.ledger.servings import Servings
from eval_service.ledger.views import Views
from eval_service.suites.curve import Besides

CARRY_OUT_S = 2.0  # how long an order waits for the controller before it answers 202
_T = TypeVar("_T")


class Services:
    """Handed to every route.

    Args:
        wake: tells the controller that there is something to do; it must not block, and may do nothing.
        proxy_address: host and port of the proxy, if there is one.
        access: who may ask for what; None: anybody for everything.
    """

    def __init__(
        self,
        database: Database,
        bounds: Bounds,
        version: str,
        wake: Callable[[], None],
        groups: Mapping[str, GroupConfig],
        proxy_address: tuple[str, int] | None = None,
        access: Access | None = None,
    ) -> None:
        self._remote = database.remote
        self.intents = Intents(database, bounds)
        self.orders = Orders(database)
        self.views = Views(database, version=version)
        self.metrics = Metrics(self.views)
        self.scaling = ScaleOrders(database, groups)
        self.advisor = Advisor(database)
        self.curves = Curves(database)
        self.besides = Besides()
        self.endpoint = Endpoint(Servings(database), *proxy_address) if proxy_address is not None else None
        self.access = access or Access()
        self.version = version
        self.wake = wake
        self.storage = Storage()
        self.watch = Watch(Changes(database))
        self.drains = SharedLook(self.views.drains_over, self.watch)
        self.room = SharedLook(self.views.with_room, self.watch)
        self.feed = Feed(EventLog(database), self.watch)
        self._writes = GroupedWrites(database)

    async def write(self, work: Callable[[Connection], _T]) -> _T:
        """Do something within a write transaction, which may be shared with others."""
        return await asyncio.wrap_future(self._writes.submit(work))

    async def known(self, run: str) -> None:
        """See that there is such a run.

        Raises:
            NotFound: there is none.
        """
        await asyncio.to_thread(self.views.check_run, run)

    def check(self) -> None:
        """See that the ledger's file can be read; what a health check asks, so it waits for no lock.

        A server that is away is nothing that another gateway would mend: this one goes on saying so (503).

        Raises:
            Unavailable: it can't.
        """
        if not self._remote:
            self.views.controller_alive()

    def close(self) -> None:
        """Let what was begun be written."""
        self._writes.close()


async def _services(request: Request) -> Services:
    # Not a coroutine, it would cost each request a thread.
    return cast("Services", request.app.state.services)


Given = Annotated[Services, Depends(_services)]


async def carried_out(services: Services, numbers: Collection[int], response: Response) -> None:
    """Wake the controller and wait for it a little; 202 where it has not carried the commands out by then."""
    if not numbers:
        return
    services.wake()
    if not await seen(services, lambda: services.views.carried_out(numbers), bool):
        response.status_code = 202


async def seen(services: Services, look: Callable[[], _T], enough: Callable[[_T], bool]) -> _T:
    """Look at the ledger whenever it changes, until what is seen is enough or `CARRY_OUT_S` have passed."""
    loop = asyncio.get_running_loop()
    until = loop.time() + CARRY_OUT_S
    while True:
        turn = services.watch.turn
        found = await asyncio.to_thread(look)
        if enough(found) or (left := until - loop.time()) <= 0:
            return found
        await services.watch.beyond(turn, left)
