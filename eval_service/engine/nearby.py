"""A pin's snapshot on the node that the engine runs on: what is in an object store is fetched into the node's cache."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from eval_service.contract.errors import EvalfleetError, SnapshotFault, Unavailable
from eval_service.engine.pin import PinFailed
from eval_service.engine.protocol import PinError, PinOrder
from eval_service.objects.places import Places
from eval_service.objects.urls import is_url


@asynccontextmanager
async def near(places: Places, order: PinOrder) -> AsyncIterator[PinOrder]:
    """The order as it is to be carried out here; its files stay as long as the pin lasts.

    Raises:
        PinFailed: the snapshot can't be had.
    """
    if not is_url(order.snapshot):
        yield order
        return
    async with AsyncExitStack() as stack:
        try:
            place = await stack.enter_async_context(places.near(order.snapshot, order.manifest.digest))
        except SnapshotFault as exc:
            raise PinFailed(PinError.NOT_VISIBLE, f"{exc.code}: {exc}") from exc
        except Unavailable as exc:
            raise PinFailed(PinError.STORE, str(exc)) from exc
        except EvalfleetError as exc:
            raise PinFailed(PinError.REFUSED, str(exc)) from exc
        yield replace(order, snapshot=str(place), roots=(str(places.cache.directory),))
