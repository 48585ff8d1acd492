"""One look at the service for `evalfleet top`: what is asked, and how it is laid out for a terminal or a pipe.

What models, datasets and engines wrote is shown as text without control characters.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eval_service.cli.output import counts, plain, plus_minus
from eval_service.contract.client import EvalClient
from eval_service.contract.curves import DrainView
from eval_service.contract.errors import Unavailable
from eval_service.contract.states import PointState
from eval_service.contract.wire import FleetView, PointView, RunView, StatusView

UNDER_WAY = (PointState.PINNING, PointState.RUNNING, PointState.SCORING)
_ROWS = 50  # of each state; a terminal shows fewer
_DETAIL_CHARS = 60


@dataclass(frozen=True, slots=True)
class Frame:
    """What the service was seen to do; `note` tells of what happened to the service itself."""

    at: float
    status: StatusView
    fleet: FleetView
    runs: tuple[RunView, ...]
    under_way: tuple[PointView, ...]
    queued: tuple[PointView, ...]
    queue: int
    drains: tuple[DrainView, ...]
    note: str | None = None

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "at": self.at,
            "note": self.note,
            "status": self.status.model_dump(mode="json"),
            "fleet": self.fleet.model_dump(mode="json"),
            "runs": [view.model_dump(mode="json") for view in self.runs],
            "under_way": [view.model_dump(mode="json") for view in self.under_way],
            "queued": [view.model_dump(mode="json") for view in self.queued],
            "queue": self.queue,
            "drains": [view.model_dump(mode="json") for view in self.drains],
        }


class Looker:
    """Makes frames; keeps the last one through a restart of the service, and says so."""

    def __init__(self, client: EvalClient, run: str | None = None) -> None:
        self._client = client
        self._run = run
        self._last: Frame | None = None
        self._away_since: float | None = None

    def look(self) -> Frame:
        """What there is now; what there was, while the service can't be reached.

        Raises:
            Unavailable: it could not be reached yet.
        """
        try:
            frame = self._ask()
        except Unavailable as exc:
            if self._last is None:
                raise
            self._away_since = self._away_since or self._last.at
            told = f"the service can't be reached since {_clock(self._away_since)}; this is what was seen then"
            return replace(self._last, note=f"{told} ({exc.message[:_DETAIL_CHARS]})")
        note: str | None = None
        if self._last is not None and self._away_since is not None:
            note = f"the service was away since {_clock(self._away_since)}, and is back"
        elif self._last is not None and frame.status.epoch != self._last.status.epoch:
            note = f"another controller acts since epoch {frame.status.epoch}"
        self._away_since = None
        self._last = replace(frame, note=note)
        return self._last

    def _ask(self) -> Frame:
        client = self._client
        of: dict[str, str | int] = {"run": self._run} if self._run is not None else {}
        runs = (client.run(self._run),) if self._run is not None else client.runs()
        under_way = [view for state in UNDER_WAY for view in client.points(**of, state=state, limit=_ROWS).points]
        queue = client.points(**of, state=PointState.QUEUED, sort="created_at", limit=_ROWS)
        drains = [drain for drain in client.drains(**of, limit=_ROWS).drains if drain.ended_at is None]
        return Frame(
            at=time.time(),
            status=client.status(),
            fleet=client.fleet(),
            runs=runs,
            under_way=tuple(under_way),
            queued=queue.points,
            queue=queue.total,
            drains=tuple(drains),
        )


def render(frame: Frame, rows: int | None = None) -> RenderableType:
    """A frame as tables.

    Args:
        rows: of a table at most, so that a terminal holds all of them; None: all.
    """
    parts: list[RenderableType] = [_head(frame)]
    if frame.note is not None:
        parts.append(Text(plain(frame.note), style="bold yellow"))
    parts.append(_table("runs", "run state step points lag scores", map(_run_row, frame.runs), rows))
    parts.append(
        _table("under way", "run step suite state engines seconds lag", _under_way_rows(frame), rows),
    )
    parts.append(_table("engines", "engine state in_flight tokens/s pinned point detail", _engine_rows(frame), rows))
    title = f"queue: {frame.queue}"
    parts.append(_table(title, "run step suite priority waits_s", (_queue_row(frame, v) for v in frame.queued), rows))
    if frame.drains:
        drains = ([d.run, frame.at - d.started_at, d.deadline - frame.at, d.drain] for d in frame.drains)
        parts.append(_table("drains", "run since_s left_s drain", drains, rows))
    return Group(*parts)


def _head(frame: Frame) -> Text:
    status, pool = frame.status, frame.fleet.pool
    acts = "acts" if status.controller_alive else "IS NOT THERE"
    told = [
        f"evalfleet {status.version}",
        f"controller {acts} (epoch {status.epoch})",
        f"points {counts(status.points)}",
        f"requests {pool.in_flight} of {pool.capacity}, {pool.waiting} wait",
        _clock(frame.at),
    ]
    return Text(plain("   ".join(told)), style="bold" if status.controller_alive else "bold red")


def _table(title: str, header: str, found: Iterable[Sequence[object]], rows: int | None) -> Table:
    found = list(found)
    shown = found if rows is None else found[:rows]
    more = f" ({len(found) - len(shown)} more)" if len(found) > len(shown) else ""
    table = Table(title=f"{title}{more}", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in header.split():
        table.add_column(name, overflow="ellipsis", no_wrap=True)
    for row in shown:
        table.add_row(*(Text(plain(cell)) for cell in row))
    return table


def _run_row(view: RunView) -> list[object]:
    scores = ", ".join(f"{suite} {plus_minus(score, None)}" for suite, score in view.metrics.items())
    behind = view.step - view.scored_step if view.step is not None and view.scored_step is not None else None
    return [view.run, view.state, view.step, counts(view.points), behind, scores]


def _under_way_rows(frame: Frame) -> list[list[object]]:
    engines = [engine for group in frame.fleet.groups for engine in group.engines]
    steps = {view.run: view.step for view in frame.runs}
    rows: list[list[object]] = []
    for view in frame.under_way:
        leased = ",".join(engine.id for engine in engines if engine.point == view.id)
        since = frame.at - (view.started_at or view.created_at)
        step = steps.get(view.run)
        rows.append(
            [view.run, view.step, view.suite, view.state, leased, since, step - view.step if step is not None else None]
        )
    return rows


def _engine_rows(frame: Frame) -> Iterable[list[object]]:
    for group in frame.fleet.groups:
        for engine in group.engines:
            detail = (engine.detail or "")[:_DETAIL_CHARS]
            spoken = engine.tokens_per_s
            pinned = engine.weight_version
            yield [engine.id, engine.state, engine.in_flight, spoken, pinned, engine.point, detail]


def _queue_row(frame: Frame, view: PointView) -> list[object]:
    forced = " (forced)" if view.force else ""
    return [view.run, view.step, view.suite, f"{view.priority}{forced}", frame.at - (view.queued_at or view.created_at)]


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
