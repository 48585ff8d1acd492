"""What is told of an event, made from the ledger when it is told: to trackers, webhooks and traces alike."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from sqlalchemy import select

from eval_service.contract.errors import NotFound
from eval_service.contract.metric_keys import cost_key, end_key, metric_key
from eval_service.contract.names import run_dir
from eval_service.contract.results import Direction
from eval_service.contract.states import ENDS, PointState
from eval_service.contract.wire import PointView
from eval_service.ledger.events import Event, EventKind
from eval_service.ledger.schema import points, runs
from eval_service.ledger.views import Views
from eval_service.trackers.config import Target, TracesConfig, TrackerConfig, WebhookConfig, WebhookEvent
from eval_service.trackers.told import Item

COSTS = ("stall_s", "export_s", "queue_s", "pin_s", "generate_s", "score_s", "duration_s")
_ENDS = frozenset(ENDS)


def scalars_of(point: PointView) -> dict[str, float]:
    """A point's keys and values in a tracker: results with their standard errors, costs, or why there is no result."""
    found: dict[str, float] = {}
    for name, metric in point.metrics.items():
        key = metric_key(point.suite, name)
        found[key] = metric.value
        if metric.stderr is not None:
            found[f"{key}_stderr"] = metric.stderr
    costs: dict[str, float | None] = {"lag_steps": point.lag_steps}
    costs |= {name: getattr(point.timings, name) for name in COSTS}
    found |= {cost_key(name): float(value) for name, value in costs.items() if value is not None}
    if point.reason is not None and point.state in (PointState.SKIPPED, PointState.FAILED):
        found[end_key(point.state, point.reason)] = 1.0
    return {key: value for key, value in found.items() if math.isfinite(value)}


class Items:
    """Makes them for one target."""

    def __init__(self, views: Views, target: Target) -> None:
        self._views = views
        self._target = target

    def of(self, event: Event) -> list[Item]:
        """What is told of an event; nothing where it is of no concern."""
        if not self._target.takes(event.run):
            return []
        data = json.loads(event.data)
        if isinstance(self._target, WebhookConfig):
            return list(self._for_webhook(event, data, self._target))
        if event.kind != EventKind.POINT or data["state"] not in _ENDS:
            return []
        point = self._point(data["point"])
        if point is None or point.state not in _ENDS:  # deleted with its run; or retried, of which its next end tells
            return []
        if isinstance(self._target, TracesConfig):
            return [self._item(event, point.state, point)]
        assert isinstance(self._target, TrackerConfig)
        return self._for_tracker(event, point, beside=self._target.kind == "jsonl")

    # --- how

    def _for_tracker(self, event: Event, point: PointView, *, beside: bool) -> list[Item]:
        if not beside:
            # What a newer point took the place of would take it back; a cancelled one has nothing to show.
            shown = point.state is not PointState.CANCELLED and not point.superseded
            return [self._item(event, point.state, point)] if shown else []
        older = self._views.points(run=point.run, suite=point.suite, step=point.step).points
        replaced = [other for other in older if other.superseded and other.id != point.id and other.state in _ENDS]
        return [self._item(event, other.state, other) for other in (*replaced, point)]

    def _for_webhook(self, event: Event, data: Mapping[str, Any], webhook: WebhookConfig) -> Iterator[Item]:
        if event.kind == EventKind.DRAIN:
            if data["state"] == "ended" and WebhookEvent.DRAINED in webhook.on:
                yield self._item(event, WebhookEvent.DRAINED, None, data)
            return
        kind = WebhookEvent.ALARM.value if event.kind == EventKind.ALARM else data.get("state")
        if event.kind not in (EventKind.POINT, EventKind.ALARM) or kind not in set(WebhookEvent):
            return
        point = self._point(data["point"])
        if kind in webhook.on:
            yield self._item(event, kind, point, data)
        if kind == WebhookEvent.DONE and WebhookEvent.BEST in webhook.on and point is not None and self._is_best(point):
            yield self._item(event, WebhookEvent.BEST, point, data)

    def _item(self, event: Event, name: str, point: PointView | None, data: Mapping[str, Any] | None = None) -> Item:
        at = json.loads(event.data)["at"]
        of = point.id if point is not None else (data or {}).get("drain", event.run)
        found: Item = {"id": f"{of}-{at:.3f}-{name}", "event": str(name), "run": event.run, "at": at}
        found["data"] = dict(data or {})
        if point is not None:
            found["point"] = json.loads(point.model_dump_json())  # without numbers that JSON has not
            found["scalars"] = scalars_of(point)
            found["directory"] = str(run_dir(self._root(point.run), point.run))
        return found

    def _point(self, point: str) -> PointView | None:
        try:
            return self._views.point(point)
        except NotFound:
            return None

    def _root(self, run: str) -> str:
        with self._views.database.reading() as connection:
            return str(
                json.loads(connection.execute(select(runs.c.spec).where(runs.c.run == run)).scalar_one())["root"]
            )

    def _is_best(self, point: PointView) -> bool:
        """Whether it was better than all that had ended before it."""
        if point.score is None or point.superseded or point.ended_at is None:
            return False
        others = (points.c.run == point.run) & (points.c.suite == point.suite) & (points.c.id != point.id)
        query = select(points.c.score).where(others, points.c.state == PointState.DONE, points.c.score.is_not(None))
        query = query.where(points.c.superseded.is_(False), points.c.ended_at <= point.ended_at)
        with self._views.database.reading() as connection:
            scores = connection.execute(query).scalars().all()
        return all(Direction(point.direction).better(point.score, score) for score in scores)
