"""`/runs/{run}/curve`: one suite's points in few bytes, and whether each is better than another one.

The curve itself is the ledger's and touches no file. Where comparisons are asked for, those that are not known yet are
made within a bound; a storage that does not answer costs the comparisons, never the curve.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Response

from eval_service.contract.curves import Beside, Curve
from eval_service.contract.errors import NotFound, Unavailable
from eval_service.gateway.services import Given, Services
from eval_service.suites.comparison import Side
from eval_service.suites.curve import Pair

routes = APIRouter(tags=["runs"])
BEFORE, BEST = "before", "best"


@routes.get("/runs/{run}/curve", response_model=Curve)
async def get_curve(
    run: str,
    services: Given,
    suite: str | None = None,
    metric: Annotated[tuple[str, ...], Query(description="none: the headline alone", max_length=20)] = (),
    against: Annotated[
        str | None,
        Query(
            pattern=rf"^({BEFORE}|{BEST}|[0-9]{{1,18}})$",
            description=f"compare each point with the one `{BEFORE}` it, the `{BEST}`, or that of a step",
        ),
    ] = None,
) -> Response:
    """The curve of one suite (left out: the run's first), in few bytes: no timings, no paths."""
    curve = await asyncio.to_thread(services.curves.curve, run, suite, metric)
    if against is not None:
        curve = await _compared(services, curve, against)
    # A thousand points are made into text where nobody waits for it.
    return Response(await asyncio.to_thread(curve.model_dump_json), media_type="application/json")


async def _compared(services: Services, curve: Curve, against: str) -> Curve:
    measured = await asyncio.to_thread(services.curves.measured, curve.run, curve.suite)
    sides = [Side(m.id, curve.run, m.step, curve.suite, m.suite_digest, Path(m.samples_path)) for m in measured]
    pairs = _pairs(sides, curve, against)
    found = services.besides.known(pairs, curve.direction)
    if None in found:
        with suppress(Unavailable):
            found = await services.storage(services.besides.told, pairs, curve.direction)
    told: dict[str, Beside | None] = {pair[1].point: beside for pair, beside in zip(pairs, found, strict=True)}
    points = tuple(point.model_copy(update={"beside": told.get(point.id)}) for point in curve.points)
    return curve.model_copy(update={"points": points, "against": against, "uncompared": found.count(None)})


def _pairs(sides: Sequence[Side], curve: Curve, against: str) -> list[Pair]:
    """Which is held against which, by step.

    Raises:
        NotFound: there is no result at the step that is named.
    """
    if against == BEFORE:
        return list(pairwise(sides))
    if against == BEST:
        base = next((side for side in sides if side.point == curve.best), None)
        return [(base, side) for side in sides if side is not base] if base is not None else []
    base = next((side for side in reversed(sides) if side.step == int(against)), None)
    if base is None:
        message = f"run {curve.run} has no result of suite {curve.suite!r} at step {against}"
        raise NotFound(message, field="against", hint=f"see `evalfleet points {curve.run}`")
    return [(base, side) for side in sides if side is not base]
