"""Wire types of `POST /fleet/{group}/scale`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from eval_service.contract.results import Wire


class ScaleRequest(Wire):
    """`POST /fleet/{group}/scale`: so many engines from now on; null: as the fleet's config says again."""

    engines: Annotated[int, Field(strict=True)] | None


class ScaleReply(Wire):
    """What was written. The fleet follows on its own; `GET /fleet` shows how far it is."""

    group: str
    engines: int | None
    least: int
    most: int
