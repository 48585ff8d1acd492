"""The real service tells a point's whole life, also to who comes late, and to who was there when the gateway died."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Iterator

import httpx
import pytest

from eval_service.chaos.victims import Part, Victims, alive
from eval_service.contract.wire import DispatchRequest, RunSpec, Source
from tests.support.live import SUITE, Live, wait_for

pytestmark = [pytest.mark.real, pytest.mark.destructive, pytest.mark.timeout(400)]


def _states(live: Live, run: str, step: int, until: str) -> Iterator[str]:
    """A point's states, by one stream after another."""
    last = 0
    while True:
        try:
            with live.http.stream(
                "GET", "/events", params={"run": run}, headers={"last-event-id": str(last)}
            ) as stream:
                kind = ""
                for line in stream.iter_lines():
                    name, _, value = line.partition(": ")
                    last = int(value) if name == "id" else last
                    kind = value if name == "event" else kind
                    if name == "data" and kind == "point" and (told := json.loads(value))["step"] == step:
                        yield told["state"]
                        if told["state"] == until:
                            return
        except httpx.TransportError:
            wait_for(lambda: _answers(live), "the gateway")


def _answers(live: Live) -> bool:
    try:
        return live.http.get("/healthz").is_success
    except httpx.TransportError:
        return False


def test_a_points_life_is_told_whole_and_in_order_while_the_gateway_is_killed(live: Live) -> None:
    run = "followed"
    live.client.put_run(run, RunSpec(root=str(live.root), suites=(SUITE,)))
    states = _states(live, run, 0, "done")
    asked = {"run": run, "step": 0, "reservation": str(uuid.uuid4())}
    live.client.dispatch(DispatchRequest.model_validate(asked))
    seen = [next(states)]
    victims = Victims(live.family)
    killed = victims.find(Part.GATEWAY)[-1]
    os.kill(killed.pid, signal.SIGKILL)
    wait_for(lambda: not alive(killed), "the gateway's end")
    wait_for(lambda: _answers(live), "another gateway")
    asked |= {"snapshot": str(live.model), "source": Source.CALLER}
    live.client.dispatch(DispatchRequest.model_validate(asked))
    assert seen + list(states) == ["reserved", "queued", "pinning", "running", "scoring", "done"]
