"""Every route over a ledger: what it answers with, and what the controller finds afterwards."""

from __future__ import annotations

import asyncio
import threading
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from eval_service.contract.results import Comparison
from eval_service.contract.states import PointState
from eval_service.contract.wire import (
    DispatchReply,
    EngineState,
    FleetView,
    GroupView,
    PointView,
    PoolView,
    Receipt,
    RunCommandReply,
    RunView,
    StatusView,
)
from eval_service.gateway import points as points_routes
from eval_service.gateway.waiting import LONG_POLL_S, SharedLook
from eval_service.suites.samples import write_samples
from tests.support.api import Api
from tests.support.ledger import result
from tests.support.views import engine, sample

S = PointState


@pytest.fixture
def api(tmp_path: Path) -> Api:
    return Api(tmp_path)


@pytest.fixture
def alone(tmp_path: Path) -> Api:
    """No controller is there."""
    return Api(tmp_path, controller=False)


def dispatch(step: int, **changes: Any) -> dict[str, Any]:
    return {"run": "r1", "step": step, "reservation": str(uuid.uuid4()), "wait_s": 0} | changes


# --- dispatch


def test_a_dispatch_is_202_when_new_and_200_when_known_or_skipped(api: Api) -> None:
    first = dispatch(1)
    reply = DispatchReply.model_validate(api.post("/dispatch", first, status=202))
    assert reply.outcome == "granted"
    assert api.post("/dispatch", first)["outcome"] == "known"
    sent = first | {"snapshot": str(api.ledger.path(1)), "digest": "a" * 32}
    assert api.post("/dispatch", sent, status=202)["outcome"] == "taken"
    assert api.post("/dispatch", sent)["outcome"] == "known"
    api.post("/dispatch", dispatch(2), status=202)
    skipped = api.post("/dispatch", dispatch(3))
    assert (skipped["outcome"], skipped["points"][0]["reason"]) == ("skipped", "busy")


def test_a_dispatch_is_answered_while_no_controller_is_there(alone: Api) -> None:
    sent = dispatch(1, snapshot=str(alone.ledger.path(1)))
    assert alone.post("/dispatch", sent, status=202)["points"][0]["state"] == "reserved"


def test_backpressure_answers_when_room_comes_while_it_waits(api: Api) -> None:
    points = [api.ledger.queued(1), api.ledger.queued(2)]
    timer = threading.Timer(0.2, lambda: api.ledger.go(points[0], S.DONE))
    timer.start()
    reply = api.post("/dispatch", dispatch(3, wait_s=20), status=202)
    timer.join(timeout=10)
    assert reply["outcome"] == "granted"


def test_backpressure_ends_with_the_callers_own_wait(api: Api) -> None:
    api.ledger.queued(1)
    api.ledger.queued(2)
    assert api.post("/dispatch", dispatch(3, wait_s=0.15))["outcome"] == "skipped"
    assert api.post("/dispatch", dispatch(4, wait_s=0.15, force=True), status=202)["outcome"] == "granted"


def test_backpressure_that_outlasts_a_poll_is_429_with_a_time_to_come_back(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval_service.gateway.dispatch.LONG_POLL_S", 0.0)
    api.ledger.queued(1)
    api.ledger.queued(2)
    response = api.request("POST", "/dispatch", json=dispatch(3, wait_s=None))
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["code"] == "busy"
    assert len(api.ledger.states()) == 2, "nothing was decided: the same reservation may ask again"


# --- runs


def test_a_run_is_put_shown_listed_and_told_its_progress(api: Api) -> None:
    spec = {"root": str(api.ledger.root), "suites": ["main"], "keep": 0, "priority": 3}
    view = RunView.model_validate(api.put("/runs/r2", spec))
    assert (view.run, view.spec.keep, view.spec.priority, view.state) == ("r2", 0, 3, "active")
    assert api.put("/runs/r2", spec | {"keep": 4})["spec"]["keep"] == 4
    assert api.request("POST", "/runs/r2/progress", json={"step": 12}).status_code == 204
    assert api.get("/runs/r2")["step"] == 12
    assert [run["run"] for run in api.get("/runs")] == ["r1", "r2"]


def test_a_run_shows_its_counts_and_latest_scores(api: Api) -> None:
    api.ledger.done(1, score=0.2)
    api.ledger.done(2, score=0.4)
    api.ledger.reach(S.FAILED, 3)
    view = RunView.model_validate(api.get("/runs/r1"))
    assert view.points == {S.DONE: 2, S.FAILED: 1}
    assert (view.metrics, view.snapshots_kept) == ({"main": 0.4}, 3)


def test_pause_and_resume_show_in_the_run(api: Api) -> None:
    assert api.post("/runs/r1/pause")["state"] == "paused"
    assert api.post("/runs/r1/resume")["state"] == "active"


def test_a_run_is_taken_back_and_backfilled(api: Api) -> None:
    point = api.ledger.queued(1)
    reply = RunCommandReply.model_validate(api.post("/runs/r1/cancel"))
    assert [(ref.id, ref.state, ref.reason) for ref in reply.points] == [(point, "cancelled", "user")]
    failed = api.ledger.reach(S.FAILED, 2)
    reply = RunCommandReply.model_validate(api.post("/runs/r1/backfill"))
    assert [(ref.id, ref.state) for ref in reply.points] == [(failed, "queued")]


def test_a_deleted_run_is_deleting_until_it_is_gone(api: Api) -> None:
    api.ledger.queued(1)
    response = api.request("DELETE", "/runs/r1")
    assert (response.status_code, response.json()["state"]) == (202, "deleting")
    assert api.ledger.states() == [(1, "main", S.CANCELLED)]
    assert api.error("POST", "/dispatch", 409, json=dispatch(2))["field"] == "run"
    assert api.request("DELETE", "/runs/r1").status_code == 202
    api.ledger.retention.forget("r1")
    assert api.error("DELETE", "/runs/r1", 404)["field"] == "run"


# --- points


def test_points_are_filtered_and_paged(api: Api) -> None:
    api.ledger.put_run("r2", suites=("main", "extra"))
    api.ledger.done(1)
    api.ledger.reach(S.FAILED, 2)
    api.ledger.send(1, run="r2")
    assert api.get("/points")["total"] == 4
    assert [p["step"] for p in api.get("/points", run="r1", state="failed")["points"]] == [2]
    assert [p["suite"] for p in api.get("/points", run="r2", suite="extra")["points"]] == ["extra"]
    assert [p["step"] for p in api.get("/points", run="r1", step=1)["points"]] == [1]
    page = api.get("/points", limit=2, offset=3)
    assert (len(page["points"]), page["total"]) == (1, 4)
    assert api.get("/points", run="r1", limit=1)["points"][0]["history"] == []


def test_a_point_shows_its_attempts(api: Api) -> None:
    view = PointView.model_validate(api.get(f"/points/{api.ledger.done(1)}"))
    assert [(a.number, a.outcome) for a in view.history] == [(1, "done")]
    assert view.snapshot == str(api.ledger.path(1))


def test_a_points_samples_are_paged_and_chosen(api: Api) -> None:
    path = api.ledger.root / "samples.parquet"
    write_samples(path, [sample(index, score=float(index % 2)) for index in range(6)])
    point = api.ledger.queued(1)
    assert "has no samples" in api.error("GET", f"/points/{point}/samples", 404)["message"]
    api.ledger.go(point, S.SCORING)
    api.ledger.moves.finish(point, result(samples_path=str(path)))
    assert [s["index"] for s in api.get(f"/points/{point}/samples", offset=4)["samples"]] == [4, 5]
    wrong = api.get(f"/points/{point}/samples", which="wrong")
    assert ([s["index"] for s in wrong["samples"]], wrong["total"]) == ([0, 2, 4], 3)


def test_commands_on_a_point_answer_with_what_became_of_it(api: Api) -> None:
    point = api.ledger.live(S.RUNNING)
    assert api.post(f"/points/{point}/cancel")["reason"] == "user"
    assert api.post(f"/points/{point}/retry")["state"] == "queued"
    assert api.post(f"/points/{point}/hold")["held"] is True
    assert api.post(f"/points/{point}/release")["held"] is False
    reserved = api.ledger.reach(S.RESERVED, 2)
    told = api.post(f"/points/{reserved}/report", {"reason": "export_failed", "detail": "disk full"})
    assert (told["state"], told["reason"], told["detail"]) == ("skipped", "export_failed", "disk full")


def scored(api: Api, step: int, scores: list[float], **changes: Any) -> str:
    """A done point with these samples."""
    path = api.ledger.root / f"samples-{step}.parquet"
    write_samples(path, [sample(i, score=score, output=f"said {score}") for i, score in enumerate(scores)])
    point = api.ledger.queued(step, f"{step:032x}")
    api.ledger.go(point, S.SCORING)
    values = {"samples_path": str(path), "headline": "exact", "suite_digest": "d" * 32, "score": sum(scores)} | changes
    assert api.ledger.moves.finish(point, result(**values))
    return point


def test_two_points_are_compared_on_the_same_prompts_and_the_flips_are_paged(api: Api) -> None:
    a, b = scored(api, 1, [0, 0, 0, 1, 0, 0, 0, 0]), scored(api, 2, [1, 1, 1, 1, 1, 1, 1, 1])
    found = Comparison.model_validate(api.get(f"/points/{a}/compare/{b}", limit=2, offset=1))
    assert (found.difference, found.verdict, found.total, found.prompts) == (0.875, "better", 7, 8)
    assert [flip.prompt_index for flip in found.flips] == [1, 2]
    assert (found.flips[0].a.output, found.flips[0].b.output) == ("said 0", "said 1")
    assert api.get(f"/points/{b}/compare/{a}", limit=0)["verdict"] == "worse"


def test_points_that_were_asked_other_things_are_not_compared(api: Api) -> None:
    a, b = scored(api, 1, [0, 1]), scored(api, 2, [1, 1], suite_digest="e" * 32)
    assert "were asked other things" in api.error("GET", f"/points/{a}/compare/{b}", 409)["message"]
    assert "has no samples" in api.error("GET", f"/points/{a}/compare/{api.ledger.queued(3)}", 404)["message"]
    assert api.error("GET", f"/points/{a}/compare/nothing", 404)["field"] == "id"


SLOW = [("compare", "/points/{0}/compare/{1}"), ("read_samples", "/points/{0}/samples")]


@pytest.mark.parametrize(("slow", "path"), SLOW)
def test_going_through_many_samples_holds_up_nobody_else(
    api: Api, monkeypatch: pytest.MonkeyPatch, slow: str, path: str
) -> None:
    points = [scored(api, 1, [0, 1]), scored(api, 2, [1, 1])]
    begun, go_on = threading.Event(), threading.Event()
    real = getattr(points_routes, slow)

    def slowly(*given: Any, **named: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return real(*given, **named)

    monkeypatch.setattr(points_routes, slow, slowly)

    async def both() -> list[int]:
        transport = httpx.ASGITransport(api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60.0) as client:
            reading = asyncio.create_task(client.get(path.format(*points)))
            assert await asyncio.to_thread(begun.wait, 60)
            alive = await client.get("/healthz")
            assert not reading.done()
            go_on.set()
            return [alive.status_code, (await reading).status_code]

    assert asyncio.run(both()) == [200, 200]


def test_advice_is_given_by_metric_direction_and_patience(api: Api) -> None:
    for step, value in ((1, 0.2), (2, 0.1)):
        scored(api, step, [value])
    assert api.get("/runs/r1/advice", patience=1)["action"] == "stop"
    assert api.get("/runs/r1/advice", patience=1, direction="min")["best"]["step"] == 2
    assert api.error("GET", "/runs/r1/advice", 422, params={"metric": "f1"})["field"] == "metric"
    assert api.error("GET", "/runs/r1/advice", 422, params={"patience": 0})["field"] == "patience"
    assert api.error("GET", "/runs/nothing/advice", 404)["field"] == "run"


def test_a_command_that_nobody_carries_out_yet_is_202(alone: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval_service.gateway.services.CARRY_OUT_S", 0.0)
    point = alone.ledger.queued(1)
    assert alone.post(f"/points/{point}/cancel", status=202)["state"] == "queued"
    assert alone.post("/runs/r1/cancel", status=202)["points"][0]["state"] == "queued"
    alone.ledger.look()
    assert alone.post(f"/points/{point}/cancel")["state"] == "cancelled"


@pytest.mark.parametrize("verb", ["cancel", "retry"])
def test_a_command_that_contradicts_the_point_is_409(api: Api, verb: str) -> None:
    point = api.ledger.done(1)
    assert api.error("POST", f"/points/{point}/{verb}", 409)["code"] == "conflict"


@pytest.mark.parametrize("verb", ["", "/samples"])
def test_no_such_point_is_404(api: Api, verb: str) -> None:
    assert api.error("GET", f"/points/nothing{verb}", 404)["field"] == "id"


@pytest.mark.parametrize("verb", ["cancel", "retry", "hold", "release", "report"])
def test_a_command_on_no_such_point_is_404(api: Api, verb: str) -> None:
    assert api.error("POST", f"/points/nothing/{verb}", 404, json={})["code"] == "not_found"


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel", "backfill", "progress"])
def test_a_command_on_no_such_run_is_404(api: Api, verb: str) -> None:
    assert api.error("POST", f"/runs/nothing/{verb}", 404, json={"step": 1})["field"] == "run"


# --- drain


def test_a_drain_answers_as_soon_as_the_last_point_has_ended(api: Api) -> None:
    point = api.ledger.queued(1)
    timer = threading.Timer(0.2, lambda: api.ledger.go(point, S.DONE))
    timer.start()
    receipt = Receipt.model_validate(api.post("/drain", {"run": "r1", "timeout_s": 60}))
    timer.join(timeout=10)
    assert (receipt.drained, receipt.open, len(receipt.done)) == (True, False, 1)
    assert Receipt.model_validate(api.get(f"/drains/{receipt.drain}")) == receipt


def test_a_drain_that_outlasts_a_poll_is_open_and_goes_on_under_its_id(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval_service.gateway.drains.LONG_POLL_S", 0.0)
    point = api.ledger.queued(1)
    body = {"run": "r1", "drain": str(uuid.uuid4())}
    first = api.post("/drain", body)
    assert (first["open"], first["drained"], first["drain"]) == (True, False, body["drain"])
    api.ledger.go(point, S.DONE)
    assert api.post("/drain", body)["drained"]


def test_drains_that_began_together_do_not_come_back_together(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 at once hold up every dispatch, each time that their polls are over."""
    waits: list[float] = []

    async def noted(_looks: SharedLook, _drain: str, wait_s: float) -> None:
        waits.append(wait_s)

    monkeypatch.setattr(SharedLook, "wait", noted)
    api.ledger.queued(1)
    for _ in range(20):
        assert api.post("/drain", {"run": "r1", "drain": str(uuid.uuid4())})["open"]
    assert all(LONG_POLL_S / 2 <= wait_s <= LONG_POLL_S for wait_s in waits)
    assert max(waits) - min(waits) > LONG_POLL_S / 8, "20 at random are closer together less than once in 10^10 times"


def test_a_drain_is_ended_by_the_gateway_where_no_controller_is(alone: Api) -> None:
    alone.ledger.done(1)
    receipt = alone.post("/drain", {"run": "r1"})
    assert (receipt["drained"], alone.get("/runs/r1")["state"]) == (True, "drained")


def test_no_such_drain_is_404(api: Api) -> None:
    assert api.error("GET", "/drains/nothing", 404)["field"] == "id"


# --- operations


def show_life(api: Api) -> None:
    engines = (engine("e1", in_flight=3, tokens_per_s=12.5), engine("e2", state=EngineState.RESTARTING))
    group = GroupView(name="eval", kind="pinned", grade="fake", desired=2, ready=1, engines=engines)
    api.ledger.moves.show_life(
        FleetView(groups=(group,), pool=PoolView(capacity=8, in_flight=3, waiting=5), seen_at=None)
    )


def test_status_and_fleet_show_what_the_controller_last_saw(api: Api) -> None:
    assert api.get("/fleet") == {
        "groups": [],
        "pool": {"capacity": 0, "in_flight": 0, "waiting": 0},
        "seen_at": None,
    }
    show_life(api)
    api.ledger.queued(1)
    status = StatusView.model_validate(api.get("/status"))
    assert (status.version, status.epoch, status.controller_alive) == ("1.2.3", 1, True)
    assert status.engines == {"ready": 1, "restarting": 1}
    assert status.tokens_per_s == {"e1": 12.5}
    assert status.points == {S.QUEUED: 1}
    assert status.runs == {"r1": {S.QUEUED: 1}}
    assert api.get("/fleet")["seen_at"] == api.ledger.clock.now


def test_healthz_is_alive_whatever_else_is(alone: Api) -> None:
    assert alone.get("/healthz")["ok"] is True


def test_readyz_wants_a_controller_and_a_ledger_that_can_be_written(api: Api) -> None:
    assert api.error("GET", "/readyz", 503)["code"] == "unavailable"
    show_life(api)
    assert api.get("/readyz")["ok"] is True
    api.ledger.clock.turn(6)
    assert "no controller" in api.error("GET", "/readyz", 503)["message"]
    show_life(api)
    with api.ledger.db.writing() as connection:
        connection.exec_driver_sql("PRAGMA query_only=ON")
    assert api.error("GET", "/readyz", 503)["field"] == "ledger"


def test_metrics_are_prometheus_text_with_every_family(api: Api) -> None:
    show_life(api)
    api.ledger.done(1)
    api.ledger.reach(S.SKIPPED, 2)
    response = api.request("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    values = {
        (metric.name, *sorted(metric.labels.values())): metric.value
        for family in text_string_to_metric_families(response.text)
        for metric in family.samples
    }
    assert values["evalfleet_points", "done", "r1"] == 1
    assert values["evalfleet_points_without_result", "r1", "skipped", "unhealthy"] == 1
    assert values["evalfleet_engines", "eval", "ready"] == 1
    assert values["evalfleet_engine_in_flight", "e1", "eval"] == 3
    assert values["evalfleet_engine_tokens_per_second", "e1", "eval"] == 12.5
    assert [values[f"evalfleet_pool_{name}",] for name in ("capacity", "in_flight", "waiting")] == [8, 3, 5]
    assert values["evalfleet_epoch",] == 1
    assert values["evalfleet_controller_alive",] == 1
