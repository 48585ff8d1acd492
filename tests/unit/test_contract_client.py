"""The client: every error is mapped, every wait has a deadline, and a drain goes on over restarts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from eval_service.contract.client import LONG_POLL_S, EvalClient
from eval_service.contract.errors import BY_CODE, Busy, Conflict, EvalfleetError, InvalidRequest, Unavailable
from eval_service.contract.results import Direction
from eval_service.contract.wire import DispatchRequest, OnTimeout, PlannedPoint, RunSpec
from tests.support.tiny_snapshots import request

Answer = Callable[[httpx.Request], httpx.Response]


@dataclass(slots=True)
class Clock:
    """Time passes only by sleeping and by answers that took long."""

    now: float = 1000.0
    slept: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@dataclass(slots=True)
class Service:
    """Answers from a script; its last answer repeats."""

    script: list[Answer]
    clock: Clock = field(default_factory=Clock)
    asked: list[httpx.Request] = field(default_factory=list)

    def __call__(self, asked: httpx.Request) -> httpx.Response:
        self.asked.append(asked)
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return answer(asked)

    def client(self) -> EvalClient:
        transport = httpx.MockTransport(self)
        return EvalClient("http://service/", transport=transport, clock=self.clock, sleep=self.clock.sleep)

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(asked.content) for asked in self.asked]


def ok(body: object) -> Answer:
    return lambda _: httpx.Response(200, json=body)


def fault(status: int, code: str) -> Answer:
    body = {"error": {"code": code, "message": "m", "field": "f", "hint": "h"}}
    return lambda _: httpx.Response(status, json=body)


def refused(asked: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("nobody there", request=asked)


def receipt(**changes: Any) -> dict[str, Any]:
    base = {"drain": "d", "run": "r1", "open": False, "drained": True, "started_at": 0, "ended_at": 1, "deadline": 9}
    return {**base, **changes}


GRANTED = {"run": "r1", "step": 4, "reservation": "x", "outcome": "granted", "points": []}


# --- errors


@pytest.mark.parametrize("code", BY_CODE)
def test_every_error_code_becomes_its_own_class_with_field_and_hint(code: str) -> None:
    with pytest.raises(EvalfleetError) as caught:
        Service([fault(BY_CODE[code].status, code)]).client().status()
    assert type(caught.value) is BY_CODE[code]
    assert (caught.value.message, caught.value.field, caught.value.hint) == ("m", "f", "h")


def test_every_class_of_the_tree_is_mapped() -> None:
    def below(cls: type[EvalfleetError]) -> set[type[EvalfleetError]]:
        return {cls}.union(*(below(child) for child in cls.__subclasses__()))

    ours = {cls for cls in below(EvalfleetError) if cls.__module__ == "eval_service.contract.errors"}
    assert set(BY_CODE.values()) == ours - {EvalfleetError}


def test_what_a_newer_service_adds_to_its_answers_is_passed_over_and_requests_stay_strict() -> None:
    point = {"id": "p", "suite": "s", "state": "done", "added": 1}
    answer = GRANTED | {"points": [point], "added": {"a": [1]}}
    client = Service([lambda _: httpx.Response(200, json=answer)]).client()
    assert [found.id for found in client.dispatch(request("r1", 4)).points] == ["p"]
    error = {"error": {"code": "conflict", "message": "m", "added": 1}, "added": 2}
    with pytest.raises(Conflict, match="m"):
        Service([lambda _: httpx.Response(409, json=error)]).client().status()
    with pytest.raises(ValidationError, match="added"):
        DispatchRequest.model_validate(request("r1", 4).model_dump() | {"added": 1})


def test_an_unknown_code_is_the_base_error() -> None:
    with pytest.raises(EvalfleetError) as caught:
        Service([fault(500, "from_the_future")]).client().status()
    assert type(caught.value) is EvalfleetError


@pytest.mark.parametrize("status", [302, 400, 404, 500, 502, 503, 504])
@pytest.mark.parametrize("body", [b"", b"<html>Bad Gateway</html>", b'{"detail":"Not Found"}'])
def test_an_error_that_is_not_our_envelope_is_a_proxy_with_nobody_behind_it(status: int, body: bytes) -> None:
    with pytest.raises(Unavailable, match=str(status)):
        Service([lambda _: httpx.Response(status, content=body)]).client().status()


@pytest.mark.parametrize(
    "raised", [httpx.ConnectError, httpx.ReadTimeout, httpx.RemoteProtocolError, httpx.PoolTimeout, httpx.ReadError]
)
def test_every_transport_fault_is_unavailable(raised: type[httpx.TransportError]) -> None:
    def fail(asked: httpx.Request) -> httpx.Response:
        raise raised("x", request=asked)

    with pytest.raises(Unavailable, match=raised.__name__):
        Service([fail]).client().status()


@pytest.mark.parametrize("content", [b"", b"{}", b"<html>hello</html>"])
def test_a_success_that_is_not_the_answer_asked_for_is_unavailable(content: bytes) -> None:
    with pytest.raises(Unavailable, match="StatusView"):
        Service([lambda _: httpx.Response(200, content=content)]).client().status()


def test_a_run_name_that_leads_elsewhere_is_never_sent() -> None:
    service = Service([ok({})])
    for call in (
        lambda: service.client().progress("../points", 1),
        lambda: service.client().run("a/b"),
        lambda: service.client().put_run("..", RunSpec(root="/r", suites=("s",))),
    ):
        with pytest.raises(InvalidRequest):
            call()
    assert service.asked == []


def test_every_call_has_a_timeout_and_long_polls_a_longer_one() -> None:
    service = Service([ok(GRANTED)])
    client = service.client()
    client.dispatch(request("r1", 4))
    client.dispatch(request("r1", 4, wait_s=2.0))
    client.dispatch(request("r1", 4, snapshot="/s"))
    reads = [asked.extensions["timeout"]["read"] for asked in service.asked]
    assert reads == [10.0 + LONG_POLL_S, 12.0, 10.0]
    assert all(None not in asked.extensions["timeout"].values() for asked in service.asked)


def test_advice_is_asked_for_with_what_was_given_and_no_more() -> None:
    advice = {"run": "r1", "suite": "s", "metric": "m", "direction": "max", "patience": 3, "action": "stop", "why": "w"}
    service = Service([ok({**advice, "best": None, "since_step": 4, "since": 1.0, "points_since": 3, "without": 0})])
    assert service.client().advice("r1").action == "stop"
    service.client().advice("r1", metric="pass@2", direction=Direction.MIN, patience=5, min_delta=0.1)
    queries = [dict(asked.url.params) for asked in service.asked]
    assert queries[0] == {"patience": "3", "min_delta": "0.0"}
    assert queries[1] == {"metric": "pass@2", "direction": "min", "patience": "5", "min_delta": "0.1"}


# --- reserve


def test_a_reservation_asks_again_under_the_same_uuid_until_there_is_room() -> None:
    service = Service([fault(429, "busy"), fault(429, "busy"), ok(GRANTED)])
    reply = service.client().reserve(request("r1", 4), deadline_s=60.0)
    assert reply.outcome == "granted"
    assert len({body["reservation"] for body in service.bodies()}) == 1
    waits = [body["wait_s"] for body in service.bodies()]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] == 60.0


def test_at_its_deadline_a_reservation_asks_for_the_final_answer() -> None:
    skipped = {**GRANTED, "outcome": "skipped"}

    def answer(asked: httpx.Request) -> httpx.Response:
        final = json.loads(asked.content)["wait_s"] == 0.0
        return (ok(skipped) if final else fault(429, "busy"))(asked)

    service = Service([answer])
    assert service.client().reserve(request("r1", 4), deadline_s=1.0).outcome == "skipped"
    assert service.clock.now == pytest.approx(1001.0)


def test_a_service_that_never_gives_a_final_answer_can_not_hold_the_trainer() -> None:
    service = Service([fault(429, "busy")])
    with pytest.raises(Busy):
        service.client().reserve(request("r1", 4), deadline_s=1.0)
    assert service.clock.now == pytest.approx(1001.0)


def test_an_unreachable_service_ends_a_reservation_at_once() -> None:
    service = Service([refused])
    with pytest.raises(Unavailable):
        service.client().reserve(request("r1", 4), deadline_s=60.0)
    assert service.clock.slept == []


# --- drain


def test_a_drain_polls_under_one_id_until_the_receipt_is_closed() -> None:
    service = Service([ok(receipt(open=True, drained=False)), ok(receipt())])
    seen: list[bool] = []
    planned = [PlannedPoint(step=4, suite="s")]
    done = service.client().drain("r1", planned=planned, timeout_s=60.0, on_progress=lambda r: seen.append(r.open))
    assert done.drained
    assert seen == [True]
    assert service.clock.slept == [0.2], "a service that does not hold the poll is not flooded"
    assert len({body["drain"] for body in service.bodies()}) == 1
    assert service.bodies()[1]["planned"] == [{"step": 4, "suite": "s"}]


def test_a_drain_resumes_under_the_same_id_after_the_service_was_away() -> None:
    service = Service([ok(receipt(open=True)), refused, fault(503, "unavailable"), ok(receipt())])
    assert service.client().drain("r1", timeout_s=60.0, on_timeout=OnTimeout.ABORT).drained
    assert len({body["drain"] for body in service.bodies()}) == 1
    assert {body["on_timeout"] for body in service.bodies()} == {"abort"}


def test_a_drain_of_an_unreachable_service_ends_at_its_deadline() -> None:
    service = Service([refused])
    with pytest.raises(Unavailable):
        service.client().drain("r1", timeout_s=5.0)
    assert service.clock.now == pytest.approx(1005.0)


def test_a_drain_that_the_service_never_closes_still_ends() -> None:
    clock = Clock()

    def still_open(asked: httpx.Request) -> httpx.Response:
        clock.now += LONG_POLL_S
        return ok(receipt(open=True, drained=False))(asked)

    left = Service([still_open], clock).client().drain("r1", timeout_s=30.0)
    assert left.open
    assert not left.drained
    assert clock.now <= 1000.0 + 30.0 + 2 * LONG_POLL_S


def test_an_error_that_waiting_does_not_mend_ends_a_drain_at_once() -> None:
    service = Service([fault(404, "not_found")])
    with pytest.raises(EvalfleetError, match="m"):
        service.client().drain("r1", timeout_s=60.0)
    assert len(service.asked) == 1
