"""Webhooks over real sockets, signed as the docs show; traces with the SDK's own exporter in memory."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from eval_service.contract.states import PointState
from eval_service.ledger.deliveries import Deliveries
from eval_service.trackers.config import TracesConfig, WebhookConfig
from eval_service.trackers.courier import Courier
from eval_service.trackers.process import Worker
from eval_service.trackers.sinks.to_traces import Sink
from tests.support.couriers import FakeReceiver, catch_up, courier
from tests.support.ledger import Ledger, result

ROOT = Path(__file__).parents[2]
SECRET = "shh"


class Receiver(ThreadingHTTPServer):
    """Answers with `status`; with None it never does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status: int | None = 200
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.done = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
        if self.server.status is None:
            self.server.done.wait(60)
            return
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("location", f"http://127.0.0.1:{self.server.server_port}/elsewhere")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.done.set()
    server.shutdown()
    thread.join()
    server.server_close()


@contextmanager
def told(ledger: Ledger, receiver: Receiver, base: Path, *, timeout_s: float = 20.0) -> Iterator[Courier]:
    """A webhook's courier with its real process."""
    url = f"http://127.0.0.1:{receiver.server_port}/hook"
    target = WebhookConfig(url=url, secret_env="HOOK_SECRET", timeout_s=timeout_s)
    worker = Worker("webhook", target, state_dir=base, log=base / "hook.log")
    one = Courier("webhook:w", target, Deliveries(ledger.db), worker)
    catch_up(one)
    try:
        yield one
    finally:
        one.close()


def verify_of_the_docs() -> Any:
    code = re.search(r"```python\n(.+?)```", (ROOT / "docs/tracking.md").read_text(), re.DOTALL)
    assert code is not None
    found: dict[str, Any] = {}
    exec(code[1], found)
    return found["verify"]


def test_a_delivery_is_signed_as_the_docs_verify_it_and_repeated_until_it_is_taken(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 is tried again under the same id; a redirect is not followed, and final."""
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    ledger = Ledger(tmp_path)
    with told(ledger, receiver, tmp_path) as one:
        receiver.status = 503
        ledger.reach(PointState.SKIPPED, 1)
        catch_up(one)
        receiver.status = 200
        ledger.clock.turn(3)
        catch_up(one)
        (first, _), (headers, body) = receiver.got
        assert first["evalfleet-delivery"] == headers["evalfleet-delivery"]
        event = json.loads(body)
        assert (event["event"], event["run"], event["point"]["reason"]) == ("skipped", "r1", "unhealthy")
        verify, signature = verify_of_the_docs(), headers["evalfleet-signature"]
        assert verify(SECRET.encode(), signature, body)
        assert not verify(SECRET.encode(), signature, body + b" ")
        assert not verify(b"other", signature, body)
        old = signature.replace(signature[2:12], str(int(time.time()) - 1000))
        assert not verify(SECRET.encode(), old, body)
        receiver.status = 302
        ledger.reach(PointState.SKIPPED, 2)
        catch_up(one)
        assert len(receiver.got) == 3
    (state,) = Deliveries(ledger.db).states()
    assert (state.delivered, state.failures, state.refused, state.waiting) == (2, 1, 1, 0)


def test_a_receiver_that_hangs_is_left_at_the_deadline_and_told_later(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    ledger = Ledger(tmp_path)
    receiver.status = None
    with told(ledger, receiver, tmp_path, timeout_s=5.0) as one:
        ledger.reach(PointState.SKIPPED, 1)
        catch_up(one)
        assert Deliveries(ledger.db).states()[0].waiting == 1
    receiver.status = 200
    ledger.clock.turn(3)
    with told(ledger, receiver, tmp_path, timeout_s=60.0):  # a process starts in its time
        pass
    assert Deliveries(ledger.db).states()[0].waiting == 0


def test_a_point_is_one_trace_of_its_stages_and_the_same_one_when_it_is_exported_again(tmp_path: Path) -> None:
    ledger, items = Ledger(tmp_path), FakeReceiver()
    traces = TracesConfig(endpoint="http://collector:4318/v1/traces")
    one = courier(ledger, traces, items, "traces")
    catch_up(one)
    point = ledger.queued(1)
    ledger.clock.turn(4)
    ledger.go(point, PointState.SCORING)
    ledger.clock.turn(30)
    assert ledger.moves.finish(point, result(timings={"pin_s": 2.0, "generate_s": 20.0, "score_s": 3.0}))
    ledger.reach(PointState.SKIPPED, 2)
    catch_up(one)
    exporter = InMemorySpanExporter()
    for item in (*items.told, items.told[0]):
        Sink(traces.model_dump(mode="json"), "", exporter).write(item)
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans[:6]] == ["evaluate", "queue", "pin", "generate", "score", "record"]
    lengths = {span.name: ((span.end_time or 0) - (span.start_time or 0)) / 1e9 for span in spans[:6]}
    assert lengths == {"evaluate": 34, "queue": 4, "pin": 2, "generate": 20, "score": 3, "record": 5}
    assert {span.parent.span_id for span in spans[1:6] if span.parent} == {spans[0].context.span_id}
    assert [span.context for span in spans[:6]] == [span.context for span in spans[-6:]]
    skipped = next(span for span in spans if span.status.description)
    assert (skipped.status.description, skipped.context.trace_id != spans[0].context.trace_id) == (
        "skipped: unhealthy",
        True,
    )
