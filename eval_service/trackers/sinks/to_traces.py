"""One OpenTelemetry trace a point, made of its recorded times when it has ended; exported by OTLP over HTTP.

Its ids are made of the point's, so that what is exported twice is the same trace.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context

from eval_service.trackers.told import Item

_STAGES = ("pin", "generate", "score")


class _Ids(IdGenerator):
    """Of a name and a count."""

    def __init__(self) -> None:
        self.name = ""
        self._count = 0

    def restart(self, name: str) -> None:
        """From here on ids are of this name."""
        self.name, self._count = name, 0

    def generate_trace_id(self) -> int:
        return self._made(16)

    def generate_span_id(self) -> int:
        self._count += 1
        return self._made(8)

    def _made(self, size: int) -> int:
        text = f"{self.name}/{self._count if size == 8 else 'trace'}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "big") or 1


class Sink:
    """Exports spans.

    Args:
        exporter: where they go; None: OTLP over HTTP, as configured.
    """

    def __init__(self, config: Mapping[str, Any], state_dir: str, exporter: SpanExporter | None = None) -> None:
        del state_dir
        self._exporter = exporter if exporter is not None else _otlp(config)
        self._ids = _Ids()
        resource = Resource.create({"service.name": "evalfleet"})
        self._tracer = TracerProvider(resource=resource, id_generator=self._ids).get_tracer("evalfleet")

    def write(self, item: Item) -> None:
        """A point's trace.

        Raises:
            OSError: it could not be exported.
        """
        self._ids.restart(item["id"])
        spans = self._spans(item)
        if self._exporter.export([span._readable_span() for span in spans]) is not SpanExportResult.SUCCESS:
            raise OSError("the collector did not take it")

    def flush(self) -> None:
        """Nothing is held back."""

    def _spans(self, item: Item) -> list[Any]:
        point = item["point"]
        ended = point["ended_at"]
        began = point["queued_at"] or point["created_at"]
        root = self._span("evaluate", None, began, _attributes(point))
        if point["state"] != "done":
            root.set_status(Status(StatusCode.ERROR, f"{point['state']}: {point['reason']}"))
        spans = [root]
        at = began
        for name, until in _stages(point, began, ended):
            span = self._span(name, root, at, {})
            span.end(end_time=_ns(until))
            spans.append(span)
            at = until
        for attempt in point["history"]:
            told = {"number": attempt["number"], "outcome": attempt["outcome"] or "", "detail": attempt["detail"] or ""}
            root.add_event("attempt", told, timestamp=_ns(attempt["ended_at"] or ended))
        root.end(end_time=_ns(ended))
        return spans

    def _span(self, name: str, parent: Span | None, at: float, attributes: Mapping[str, Any]) -> Any:
        context = set_span_in_context(parent) if parent is not None else None
        return self._tracer.start_span(name, context=context, start_time=_ns(at), attributes=dict(attributes))


def _stages(point: Mapping[str, Any], began: float, ended: float) -> list[tuple[str, float]]:
    """Names and ends: the queue until the last attempt began, then what it recorded, and the rest as `record`."""
    at = min(point["started_at"] or ended, ended)
    found = [("queue", max(at, began))]
    for name in _STAGES:
        if (spent := point["timings"][f"{name}_s"]) is not None and point["started_at"] is not None:
            at = min(at + spent, ended)
            found.append((name, at))
    if point["state"] == "done":
        found.append(("record", ended))
    return found


def _attributes(point: Mapping[str, Any]) -> dict[str, Any]:
    names = ("id", "run", "step", "suite", "kind", "state", "reason", "attempts", "score", "lag_steps", "pin_proof")
    return {f"evalfleet.{name}": point[name] for name in names if point[name] is not None}


def _ns(at: float) -> int:
    return int(at * 1e9)


def _otlp(config: Mapping[str, Any]) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    headers = {"authorization": f"Bearer {os.environ[config['token_env']]}"} if config["token_env"] else None
    return OTLPSpanExporter(endpoint=config["endpoint"], headers=headers, timeout=config["timeout_s"] * 0.5)
