"""Wire types of `POST /fleet/{group}/scale`."""

from __future__ import annotations

from eval_service.contract.wire import Wire


class ScaleRequest(Wire):
    """`POST /fleet/{group}/scale`: so many engines from now on; null: as the fleet's config says again."""

    engines: int | None


class ScaleReply(Wire):
    """What was written. The fleet follows on its own; `GET /fleet` shows how far it is."""

    group: str
    engines: int | None
    least: int
    most: int
