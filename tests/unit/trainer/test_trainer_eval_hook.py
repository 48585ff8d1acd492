"""What becomes of a point when the service is away, refuses, or has it already; the service is a stub, in process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest

from eval_service.contract.client import EvalClient
from eval_service.contract.errors import ConfigError
from eval_service.contract.manifest import Canary
from eval_service.contract.outbox import Outbox
from eval_service.contract.safetensors_io import TensorData
from eval_service.contract.snapshot import SnapshotWriter
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import DispatchRequest, Kind, Receipt
from tests.support.stub_service import StubService
from trainer.background import Background
from trainer.cadence import Point
from trainer.config import RunConfig
from trainer.drain import drain, summary
from trainer.eval_hook import EvalHook
from trainer.parallel import Channel
from trainer.service_link import ServiceLink
from trainer.stager import Stager
from trainer.steplog import StepLog, read_steplog
from trainer.stopping import Stopped
from trainer.weights import ExportFailed


@dataclass
class FakeWeights:
    """A model of four bytes; `value` is its content, `fault` what writing it meets."""

    value: float = 1.0
    fault: Exception | None = None
    fault_after: Exception | None = None
    staged: float = 0.0
    hold: Callable[[], object] = lambda: None
    written: list[str] = field(default_factory=list)

    def here(self) -> AbstractContextManager[None]:
        return nullcontext()

    def stage(self) -> None:
        self.staged = self.value

    def fill(self, writer: SnapshotWriter) -> None:
        self.hold()
        writer.partial.mkdir(parents=True)
        if self.fault is not None:
            raise ExportFailed(str(self.fault)) from self.fault
        self.written.append(writer.nonce)
        writer.add_weights("model.safetensors", [TensorData("w", "U8", (4,), bytes([int(self.staged)] * 4))])
        if self.fault_after is not None:
            raise ExportFailed(str(self.fault_after)) from self.fault_after

    def canary(self) -> Canary | None:
        return None


@dataclass
class Bench:
    """One launch of a trainer's eval side."""

    config: RunConfig
    stub: StubService
    weights: FakeWeights
    hook: EvalHook
    stager: Stager

    @property
    def outbox(self) -> Outbox:
        return self.hook.link.outbox

    def evaluate(self, point: Point, *, if_lacking: bool = False) -> None:
        """A point, and all that is behind."""
        self.hook.evaluate(point, if_lacking=if_lacking)
        assert self.hook.join(60.0)

    def events(self) -> list[str]:
        return [entry["event"] for entry in read_steplog(self.config.output_dir / "steps.jsonl")]

    def drain(self) -> Receipt:
        self.config.output_dir.mkdir(parents=True, exist_ok=True)
        return drain(self.hook, output_dir=self.config.output_dir)


def _client(stub: StubService, sleep: Callable[[float], None] = lambda _: None) -> EvalClient:
    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        query = parse_qs(request.url.query.decode())
        status, reply = stub.answer(request.method, request.url.path, query, body)
        if reply is None or isinstance(reply, str):
            return httpx.Response(status, text=reply or "")
        return httpx.Response(status, text=json.dumps(reply) if isinstance(reply, dict) else reply.model_dump_json())

    return EvalClient("http://stub", transport=httpx.MockTransport(answer), sleep=sleep)


def _launch(config: RunConfig, stub: StubService, log: StepLog) -> Bench:
    weights = FakeWeights()
    stager = Stager(weights, Channel(None), Background())
    hook = EvalHook(config, ServiceLink(config, _client(stub), log), log, stager)
    return Bench(config, stub, weights, hook, stager)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Points at will, two in flight."""
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "root": tmp_path},
            "model": {"hf_path": tmp_path / "base"},
            "data": {"train": tmp_path / "train.jsonl"},
            "train": {"num_steps": 10},
            "eval": {"url": "http://stub", "interval": 1, "suites": ["main"], "drain_timeout_s": 0},
        }
    )


@pytest.fixture
def log(config: RunConfig) -> Iterator[StepLog]:
    """The step log."""
    log = StepLog(config.output_dir / "steps.jsonl")
    yield log
    log.close()


@pytest.fixture
def bench(config: RunConfig, log: StepLog) -> Bench:
    """A first launch."""
    return _launch(config, StubService(), log)


PERIODIC = Point(3, Kind.PERIODIC)
FINAL = Point(10, Kind.FINAL, force=True)


def test_a_point_is_reserved_exported_and_handed_over_under_one_uuid(bench: Bench) -> None:
    bench.evaluate(PERIODIC)
    assert bench.events() == ["eval_reserved", "eval_staged", "eval_exported", "eval_dispatched"]
    first, second = (body for call, body in bench.stub.calls if call == "POST /dispatch")
    assert first["reservation"] == second["reservation"]
    assert first["snapshot"] is None
    assert second["digest"] == bench.stub.point(3).digest
    assert second["export_s"] is not None
    assert second["stall_s"] is not None


def test_the_request_lies_in_the_snapshot_for_the_services_scan(bench: Bench) -> None:
    bench.evaluate(PERIODIC)
    snapshot = Path(str(bench.stub.point(3).snapshot))
    (request,) = json.loads((snapshot / "dispatch.json").read_text())
    assert request["snapshot"] == str(snapshot)
    assert request["reservation"] == bench.stub.point(3).reservation


def test_a_skipped_reservation_pays_for_no_export(bench: Bench) -> None:
    bench.stub.busy = lambda _: True
    bench.evaluate(PERIODIC)
    assert bench.weights.written == []
    assert bench.events() == ["eval_skipped"]


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), RuntimeError("boom")])
def test_an_export_that_fails_is_reported_and_leaves_nothing(bench: Bench, fault: Exception) -> None:
    bench.weights.fault = fault
    bench.evaluate(PERIODIC)
    point = bench.stub.point(3)
    assert (point.state, point.reason) == (PointState.SKIPPED, Reason.EXPORT_FAILED)
    assert not list((bench.config.run.root / "r").glob(".partial-*"))


def test_a_report_that_cannot_be_sent_is_sent_with_the_drain(bench: Bench) -> None:
    bench.weights.fault = OSError("disk")
    bench.stub.away = lambda call: "/report" in call
    bench.evaluate(PERIODIC)
    assert bench.stub.point(3).state is PointState.RESERVED
    bench.stub.away = lambda _: False
    assert bench.drain().drained
    assert bench.stub.point(3).reason is Reason.EXPORT_FAILED


def test_while_the_service_is_away_the_bound_holds_but_for_a_forced_one(bench: Bench) -> None:
    bench.stub.away = lambda _: True
    for step in (1, 2, 3):
        bench.evaluate(Point(step, Kind.PERIODIC))
    bench.evaluate(FINAL)
    assert [request.step for _, request in bench.outbox.pending()] == [1, 2, 10]
    assert all(request.deferred for _, request in bench.outbox.pending())
    assert bench.events().count("eval_skipped") == 1


def test_what_was_kept_goes_before_the_next_point_when_the_service_is_back(bench: Bench) -> None:
    bench.stub.away = lambda _: True
    bench.evaluate(Point(1, Kind.PERIODIC))
    bench.stub.away = lambda _: False
    bench.evaluate(PERIODIC)
    assert bench.stub.steps() == [1, 3]
    assert list(bench.outbox.pending()) == []


def test_a_refused_or_unreadable_request_in_the_outbox_does_not_hold_up_the_others(bench: Bench) -> None:
    bench.stub.away = lambda _: True
    for step in (1, 2):
        bench.evaluate(Point(step, Kind.PERIODIC))
    (bench.outbox.directory / "junk.json").write_text("{")
    bench.stub.away = lambda _: False
    bench.stub.refuses = lambda request: request.step == 1
    assert bench.drain().drained
    assert bench.stub.steps() == [2]
    assert {"eval_refused", "outbox_unreadable"} <= set(bench.events())


def test_an_outbox_that_cannot_be_read_costs_no_point_and_no_receipt(bench: Bench) -> None:
    bench.hook.link.outbox = Outbox(bench.config.run.root / ("n" * 300))  # what looks at it fails as a dead mount does
    bench.evaluate(PERIODIC)
    assert bench.drain().drained
    assert bench.stub.steps() == [3]
    bench.stub.away = lambda _: True
    receipt = bench.drain()
    assert not receipt.drained
    assert {"outbox_away", "receipt_failed", "drain_end"} <= set(bench.events())


def test_a_service_that_has_lost_its_ledger_is_told_of_the_run_again_and_no_point_is_lost(bench: Bench) -> None:
    link = bench.hook.link
    link.at_step(3)
    assert link.flush()
    bench.stub.specs.clear()
    bench.stub.away = lambda call: not bench.stub.specs and not call.startswith("PUT")
    bench.stub.away_reply = (404, {"error": {"code": "not_found", "message": "no run 'r'"}})
    bench.evaluate(PERIODIC)
    assert bench.stub.points == []
    assert bench.drain().drained
    assert list(bench.stub.specs) == ["r"]
    assert bench.stub.steps() == [3]


def test_a_snapshot_that_the_service_refuses_ends_its_point(bench: Bench) -> None:
    bench.stub.refuses = lambda request: request.snapshot is not None
    bench.evaluate(PERIODIC)
    assert bench.stub.point(3).reason is Reason.EXPORT_FAILED
    assert "refused" in str(bench.stub.point(3).detail)


def test_a_stop_ends_the_wait_for_room(bench: Bench) -> None:
    def stopped(_: float) -> None:
        raise Stopped

    bench.stub.away = lambda call: call == "POST /dispatch"
    bench.stub.away_reply = (429, {"error": {"code": "busy", "message": "ask again"}})
    bench.hook.link.client = _client(bench.stub, sleep=stopped)
    bench.evaluate(PERIODIC)
    assert bench.events() == ["eval_skipped"]
    assert bench.weights.written == []


def test_what_was_written_of_an_export_that_fails_later_is_removed(bench: Bench) -> None:
    bench.weights.fault_after = OSError(28, "No space left on device")
    bench.evaluate(PERIODIC)
    assert bench.weights.written
    assert bench.stub.point(3).reason is Reason.EXPORT_FAILED
    assert [path.name for path in (bench.config.run.root / "r").iterdir()] == ["trainer"]


def _held(writing: threading.Event, go_on: threading.Event) -> Callable[[], object]:
    """A write that says that it has begun, and waits."""

    def hold() -> object:
        writing.set()
        return go_on.wait(30)

    return hold


@dataclass
class Times:
    """A clock that goes on by what each part of an export takes."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, which takes so long."""

        def timed(*args: Any) -> Any:
            self.now += seconds
            return call(*args)

        return timed


def test_stall_is_what_the_step_waits_for_but_the_canary_and_nothing_that_is_behind(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = Times()
    bench.hook.clock = bench.stager.clock = times
    canary = Canary(dtype="float32", token_ids=((1, 2),), logprobs=((-1.0,),))
    for name, seconds, call in (
        ("stage", 1.0, bench.weights.stage),
        ("canary", 10.0, lambda: canary),
        ("fill", 100.0, bench.weights.fill),
    ):
        monkeypatch.setattr(bench.weights, name, times.passes(seconds, call))
    bench.evaluate(PERIODIC)
    request = [body for call, body in bench.stub.calls if call == "POST /dispatch"][-1]
    assert (request["stall_s"], request["canary_s"], request["export_s"]) == (1.0, 10.0, 101.0)


def test_the_second_export_waits_for_the_buffer_and_copies_what_is_there_then(bench: Bench) -> None:
    writing, go_on = threading.Event(), threading.Event()
    bench.weights.hold = _held(writing, go_on)
    bench.hook.evaluate(PERIODIC)
    assert writing.wait(30)
    bench.weights.value = 2
    second = threading.Thread(target=bench.hook.evaluate, args=(Point(4, Kind.PERIODIC),))
    second.start()
    assert bench.stub.steps(PointState.RESERVED)[:1] == [3]
    go_on.set()
    second.join(30)
    assert bench.hook.join(30)
    assert bench.stub.steps() == [3, 4]
    assert bench.stub.point(3).digest != bench.stub.point(4).digest


def test_an_export_that_finds_the_buffer_busy_to_the_deadline_is_skipped_and_a_forced_one_is_not(
    bench: Bench, config: RunConfig
) -> None:
    """As on a slow disk, where one export takes longer than the interval of points."""
    section = config.eval.model_copy(update={"buffer_timeout_s": 0.0, "drain_timeout_s": 30.0})
    bench.hook.config = config.model_copy(update={"eval": section})
    writing, go_on = threading.Event(), threading.Event()
    bench.weights.hold = _held(writing, go_on)
    bench.hook.evaluate(PERIODIC)
    assert writing.wait(30)
    bench.hook.evaluate(Point(4, Kind.PERIODIC))
    point = bench.stub.point(4)
    assert (point.state, point.reason) == (PointState.SKIPPED, Reason.BUSY)
    assert "eval.buffer_timeout_s" in str(point.detail)
    final = threading.Thread(target=bench.hook.evaluate, args=(FINAL,))
    final.start()
    go_on.set()
    final.join(30)
    assert bench.hook.join(30)
    assert bench.stub.steps() == [3, 10]


def test_what_a_launch_granted_itself_counts_while_it_is_still_being_written(bench: Bench) -> None:
    bench.stub.away = lambda _: True
    writing, go_on = threading.Event(), threading.Event()
    bench.weights.hold = _held(writing, go_on)
    bench.hook.config = bench.config.model_copy(
        update={"eval": bench.config.eval.model_copy(update={"max_in_flight": 1})}
    )
    bench.hook.evaluate(Point(1, Kind.PERIODIC))
    assert writing.wait(30)
    bench.hook.evaluate(Point(2, Kind.PERIODIC))
    go_on.set()
    assert bench.hook.join(30)
    assert [request.step for _, request in bench.outbox.pending()] == [1]
    assert [entry.step for entry in bench.hook.skipped] == [2]


def test_what_a_launch_granted_itself_counts_while_it_goes_into_the_outbox(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a third snapshot slips in where two are allowed, just as the one before is put there."""
    bench.stub.away = lambda _: True
    link, keeping, go_on = bench.hook.link, threading.Event(), threading.Event()
    keep, pending = link.keep, link.pending

    def keeps(request: DispatchRequest) -> None:
        keeping.set()
        assert go_on.wait(30)
        keep(request)

    def reads() -> list[tuple[Path, DispatchRequest]]:
        found = pending()
        go_on.set()  # it is put there, and leaves what is under way, as soon as this was read
        assert bench.hook.join(30)
        return found

    section = bench.config.eval.model_copy(update={"max_in_flight": 1})
    bench.hook.config = bench.config.model_copy(update={"eval": section})
    monkeypatch.setattr(link, "keep", keeps)
    bench.hook.evaluate(Point(1, Kind.PERIODIC))
    assert keeping.wait(30)
    monkeypatch.setattr(link, "pending", reads)
    bench.hook.evaluate(Point(2, Kind.PERIODIC))
    assert [entry.step for entry in bench.hook.skipped] == [2]
    assert [request.step for _, request in bench.outbox.pending()] == [1]


def test_the_drain_waits_for_what_is_being_written(bench: Bench) -> None:
    bench.hook.config = bench.config.model_copy(
        update={"eval": bench.config.eval.model_copy(update={"drain_timeout_s": 30.0})}
    )
    writing, go_on = threading.Event(), threading.Event()
    bench.weights.hold = _held(writing, go_on)
    bench.hook.evaluate(FINAL)
    assert writing.wait(30)
    threading.Timer(0.2, go_on.set).start()
    assert [p.step for p in bench.drain().done] == [10]
    assert bench.events().index("eval_dispatched") < bench.events().index("drain_begin")


def test_an_export_that_outlives_its_launch_is_kept_for_the_next_one(bench: Bench, log: StepLog) -> None:
    """Its drain's time was up: client and log are closed when it comes to telling of its snapshot."""
    writing, go_on = threading.Event(), threading.Event()
    bench.weights.hold = _held(writing, go_on)
    bench.hook.evaluate(FINAL)
    assert writing.wait(30)
    bench.drain()
    assert "export_abandoned" in bench.events()
    bench.hook.link.client.close()
    log.close()
    go_on.set()
    assert bench.hook.join(30)
    assert [request.step for _, request in bench.outbox.pending()] == [10]


def test_an_unreachable_drain_leaves_a_receipt_in_the_outbox(bench: Bench) -> None:
    bench.evaluate(Point(1, Kind.PERIODIC))
    bench.stub.away = lambda _: True
    for step in (2, 3, 4):
        bench.evaluate(Point(step, Kind.PERIODIC))
    receipt = bench.drain()
    assert not receipt.drained
    assert [p.step for p in receipt.deferred] == [2, 3]
    assert [(p.step, p.reason) for p in receipt.skipped] == [(4, "busy")]
    assert [p.step for p in receipt.pending] == [1]
    assert Receipt.model_validate_json((bench.outbox.directory / "receipt.json").read_bytes()) == receipt
    assert summary(receipt) == "not drained: 1 skipped, 1 pending, 2 deferred"


def test_a_drain_that_succeeds_removes_the_receipt_of_one_that_did_not(bench: Bench) -> None:
    bench.stub.away = lambda _: True
    bench.drain()
    bench.stub.away = lambda _: False
    assert bench.drain().drained
    assert not (bench.outbox.directory / "receipt.json").exists()


def test_a_service_that_answers_nonsense_stops_nothing(bench: Bench) -> None:
    bench.stub.answer = lambda *_: (200, {"what": "ever"})  # type: ignore[method-assign]
    bench.evaluate(PERIODIC)
    assert not bench.drain().drained


def test_an_unknown_suite_is_refused_at_start_up(bench: Bench) -> None:
    bench.stub.known_suites = frozenset()
    with pytest.raises(ConfigError, match="no suite main"):
        bench.hook.link.check()


def test_a_service_that_is_away_at_start_up_is_no_refusal(bench: Bench) -> None:
    bench.stub.away = lambda _: True
    bench.hook.link.check()
    assert bench.events() == ["service_away"]


# --- a launch after one that was killed


def test_a_reservation_without_a_snapshot_is_gone_on_with(bench: Bench, log: StepLog) -> None:
    bench.weights.fault = OSError("killed here, say")
    bench.stub.away = lambda call: "/report" in call
    bench.evaluate(PERIODIC)
    bench.stub.away = lambda _: False
    _launch(bench.config, bench.stub, log).evaluate(PERIODIC)
    assert [(p.step, p.state) for p in bench.stub.points] == [(3, PointState.DONE)]


def test_the_same_content_again_makes_no_second_point(bench: Bench, log: StepLog) -> None:
    bench.evaluate(PERIODIC)
    _launch(bench.config, bench.stub, log).evaluate(PERIODIC)
    assert len(bench.stub.points) == 1
    assert bench.events()[-1] == "eval_known"


def test_other_content_at_the_same_step_is_a_new_point(bench: Bench, log: StepLog) -> None:
    bench.evaluate(PERIODIC)
    again = _launch(bench.config, bench.stub, log)
    again.weights.value = 2
    again.evaluate(PERIODIC)
    old, new = bench.stub.points
    assert old.superseded
    assert new.digest != old.digest
    assert len(list((bench.config.run.root / "r").glob("step_3-*"))) == 2


def test_a_snapshot_that_was_published_but_not_handed_over_keeps_its_uuid(bench: Bench, log: StepLog) -> None:
    bench.evaluate(PERIODIC)
    reservation = bench.stub.points.pop().reservation
    _launch(bench.config, bench.stub, log).evaluate(PERIODIC)
    assert [(p.reservation, p.state) for p in bench.stub.points] == [(reservation, PointState.DONE)]


def test_a_point_that_ended_badly_is_tried_again(bench: Bench, log: StepLog) -> None:
    bench.evaluate(PERIODIC)
    bench.stub.points[0] = bench.stub.points[0].model_copy(
        update={"state": PointState.FAILED, "reason": Reason.MAX_ATTEMPTS}
    )
    _launch(bench.config, bench.stub, log).evaluate(PERIODIC)
    assert [p.state for p in bench.stub.points] == [PointState.FAILED, PointState.DONE]


def test_a_final_point_in_the_ledger_is_not_exported_to_find_out(bench: Bench, log: StepLog) -> None:
    bench.evaluate(FINAL)
    again = _launch(bench.config, bench.stub, log)
    again.evaluate(FINAL, if_lacking=True)
    assert again.weights.written == []
    assert len(bench.stub.points) == 1


def test_a_final_point_is_not_made_twice_while_the_ledger_cannot_be_asked(bench: Bench, log: StepLog) -> None:
    bench.evaluate(FINAL)
    bench.stub.away = lambda _: True
    again = _launch(bench.config, bench.stub, log)
    again.evaluate(FINAL, if_lacking=True)
    assert list(again.outbox.pending()) == []
