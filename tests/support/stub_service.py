"""An in-process HTTP server with the service's routes that a trainer calls; it takes points in and never runs one.

A point is done as soon as its snapshot is taken in, unless `holds` says otherwise. Every call is kept in order, so a
test may ask what the trainer did. It can be switched off (`away`), per route too, and on again.
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import (
    DispatchReply,
    DispatchRequest,
    DrainRequest,
    EndedPoint,
    Granted,
    PointPage,
    PointRef,
    PointView,
    Receipt,
    RunSpec,
    RunView,
    Timings,
)


@dataclass
class StubService:
    """What the server holds; `points` is its ledger, in the order of creation."""

    points: list[PointView] = field(default_factory=list)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    specs: dict[str, RunSpec] = field(default_factory=dict)
    drains: list[DrainRequest] = field(default_factory=list)
    away: Callable[[str], bool] = lambda _: False
    known_suites: frozenset[str] = frozenset({"main"})
    busy: Callable[[DispatchRequest], bool] = lambda _: False
    refuses: Callable[[DispatchRequest], bool] = lambda _: False
    away_reply: tuple[int, Any] = (503, "away")
    url: str = ""

    def point(self, step: int) -> PointView:
        """The newest point of a step."""
        return [point for point in self.points if point.step == step][-1]

    def steps(self, state: PointState = PointState.DONE) -> list[int]:
        """Steps of the points in a state."""
        return [point.step for point in self.points if point.state is state]

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        """One call."""
        self.calls.append((f"{method} {path}", body))
        if self.away(f"{method} {path}"):
            return self.away_reply
        if method == "PUT":
            return self._put_run(path.split("/")[2], body)
        if path == "/dispatch":
            request = DispatchRequest.model_validate(body)
            if self.refuses(request):
                return 422, {"error": {"code": "invalid_request", "message": "no"}}
            return 202, self._dispatch(request)
        if path == "/points":
            return 200, self._page(query)
        if path == "/drain":
            return 200, self._drain(DrainRequest.model_validate(body))
        if match := re.fullmatch(r"/points/([^/]+)/report", path):
            return 200, self._report(match[1], body)
        return 204, None

    def _put_run(self, run: str, body: Any) -> tuple[int, Any]:
        spec = RunSpec.model_validate(body)
        unknown = set(spec.suites) - self.known_suites
        if unknown:
            error = {"code": "invalid_request", "message": f"no suite {min(unknown)}", "field": "suites"}
            return 422, {"error": error}
        self.specs[run] = spec
        counts: dict[PointState, int] = {}
        for point in self.points:
            counts[point.state] = counts.get(point.state, 0) + 1
        return 200, RunView(
            run=run,
            spec=spec,
            state="active",
            step=None,
            progress_at=None,
            created_at=0.0,
            points=counts,
            snapshots_kept=0,
            metrics={},
        )

    def _dispatch(self, request: DispatchRequest) -> DispatchReply:
        held = [point for point in self.points if point.reservation == request.reservation]
        outcome = Granted.KNOWN
        if not held:
            refused = self.busy(request) and not (request.force or request.deferred)
            outcome = Granted.SKIPPED if refused else Granted.GRANTED
            held = [self._new(request, suite, refused) for suite in request.suites or ("main",)]
            self.points += held
        if request.snapshot is not None and all(point.state is PointState.RESERVED for point in held):
            outcome = Granted.TAKEN
            taken = {"snapshot": request.snapshot, "digest": request.digest, "state": PointState.DONE}
            held = [self._replace(point, **taken) for point in held]
        refs = tuple(PointRef(id=point.id, suite=point.suite, state=point.state, reason=point.reason) for point in held)
        return DispatchReply(
            run=request.run, step=request.step, reservation=request.reservation, outcome=outcome, points=refs
        )

    def _new(self, request: DispatchRequest, suite: str, refused: bool) -> PointView:
        for older in self.points:
            if older.step == request.step and older.suite == suite:
                self._replace(older, superseded=True)
        return PointView(
            id=uuid.uuid4().hex,
            run=request.run,
            step=request.step,
            suite=suite,
            kind=request.kind,
            force=request.force,
            priority=request.priority or 0,
            reservation=request.reservation,
            state=PointState.SKIPPED if refused else PointState.RESERVED,
            reason=Reason.BUSY if refused else None,
            detail=None,
            superseded=False,
            source=request.source,
            snapshot=None,
            digest=None,
            weight_version=None,
            pin_proof=None,
            attempts=0,
            score=None,
            stderr=None,
            metrics={},
            lag_steps=None,
            timings=Timings(),
            created_at=time.time(),
            queued_at=None,
            started_at=None,
            ended_at=None,
            samples_path=None,
        )

    def _replace(self, point: PointView, **changes: Any) -> PointView:
        new = point.model_copy(update=changes)
        self.points[[held.id for held in self.points].index(point.id)] = new
        return new

    def _page(self, query: dict[str, list[str]]) -> PointPage:
        steps = [int(step) for step in query.get("step", [])]
        found = tuple(point for point in self.points if not steps or point.step in steps)
        return PointPage(points=found, total=len(found))

    def _report(self, point_id: str, body: Any) -> PointView:
        point = next(point for point in self.points if point.id == point_id)
        return self._replace(point, state=PointState.SKIPPED, reason=Reason(body["reason"]), detail=body["detail"])

    def _drain(self, request: DrainRequest) -> Receipt:
        self.drains.append(request)
        came = {(point.step, point.suite) for point in self.points}
        done = tuple(EndedPoint(step=p.step, suite=p.suite) for p in self.points if p.state is PointState.DONE)
        missing = tuple(
            EndedPoint(step=p.step, suite=p.suite) for p in request.planned if (p.step, p.suite) not in came
        )
        return Receipt(
            drain=request.drain or "",
            run=request.run,
            open=False,
            drained=True,
            started_at=0.0,
            deadline=0.0,
            done=done,
            never_came=missing,
        )


@contextmanager
def serving(stub: StubService) -> Iterator[StubService]:
    """Serve a stub on a free port of the loopback; its `url` is set."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(stub))
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


def _handler(stub: StubService) -> type[BaseHTTPRequestHandler]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 10

        def _serve(self) -> None:
            url = urlsplit(self.path)
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            with lock:
                status, reply = stub.answer(self.command, url.path, parse_qs(url.query), body)
            data = b"" if reply is None else _encoded(reply)
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(data)
            self.close_connection = True

        do_GET = do_POST = do_PUT = _serve  # noqa: N815 - the library's names

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    return Handler


def _encoded(reply: Any) -> bytes:
    return (json.dumps(reply) if isinstance(reply, dict | str) else reply.model_dump_json()).encode()
