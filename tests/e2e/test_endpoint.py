"""A checkpoint to talk to: the proxy of the real service, in front of real engines, by the clients that people use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from eval_service.chaos.victims import alive
from eval_service.contract.errors import Conflict, NotFound
from eval_service.contract.serving import ServingView
from eval_service.contract.wire import DispatchRequest, Kind, PointView, RunSpec, Source
from tests.support.live import DONE, SUITE, Live, lane, wait_for
from tests.support.work import Work

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
RUN = "talked-to"
CHAT = {"model": "any", "messages": [{"role": "user", "content": "sort: cab"}], "max_tokens": 6, "temperature": 0}


def _dispatch(live: Live, step: int) -> str:
    request = DispatchRequest(
        run=RUN,
        step=step,
        suites=(SUITE,),
        kind=Kind.MANUAL,
        source=Source.CALLER,
        snapshot=str(live.model),
        reservation=str(uuid.uuid4()),
    )
    return live.client.dispatch(request).points[0].id


@pytest.fixture(scope="module")
def point(live: Live) -> PointView:
    live.wait_engines()
    live.client.put_run(RUN, RunSpec(root=str(live.root), suites=(SUITE,), max_in_flight=10))
    asked = _dispatch(live, 0)
    wait_for(lambda: live.client.point(asked).state is DONE, "the point to be done")
    return live.client.point(asked)


@pytest.fixture
def serving(live: Live, point: PointView) -> Iterator[ServingView]:
    view = live.client.serve(point.id, for_s=300.0)
    wait_for(lambda: live.client.serving(point.id).engines, "an engine to serve it")
    yield view
    live.client.end_serving(point.id)
    _await_end(live, point)


def _await_end(live: Live, point: PointView) -> None:
    """One that is opened before its engine was let go of tells of that engine, which serves it no more."""

    def ended() -> bool:
        try:
            live.client.serving(point.id)
        except NotFound:
            return True
        return False

    wait_for(ended, "its engine to be let go of")


def test_a_checkpoint_is_talked_to_by_the_openai_and_the_native_routes_with_its_own_weights(
    live: Live, point: PointView, serving: ServingView
) -> None:
    version = live.client.serving(point.id).weight_version
    with lane(serving.url) as http:
        chat = http.post("/v1/chat/completions", json=CHAT)
        assert chat.status_code == 200, chat.text
        text = chat.json()["choices"][0]["message"]["content"]
        assert chat.headers["X-Router-Weights"] == version
        with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
            events = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        pieces = [json.loads(event)["choices"] for event in events[:-1]]
        assert "".join(choice[0]["delta"].get("content") or "" for choice in pieces if choice) == text
        assert len(pieces) > 2, "piece by piece"
        body = {"text": "ab", "return_logprob": True, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        native = http.post("/generate", json=body).json()
        assert native["meta_info"]["weight_version"] == version
        scored = http.post(
            "/v1/completions",
            json={"model": "any", "prompt": "ab", "max_tokens": 4, "temperature": 0, "logprobs": 1, "echo": True},
        )
        assert scored.json()["choices"][0]["text"] == "ab" + native["text"]
        assert http.get("/v1/models").status_code == 200
        assert http.post("/generate", json={"input_ids": [10**6]}).json()["error"]["code"] == "bad_tokens"
        for path in ("/update_weights_from_disk", "/flush_cache", "/abort_request", "/server_info"):
            assert http.post(path, json={}).json()["error"]["code"] == "no_route"


def test_a_task_of_inspect_ai_runs_against_a_checkpoint_and_has_its_answers(
    live: Live, point: PointView, serving: ServingView, tmp_path: Path
) -> None:
    command = ["-m", "inspect_ai", "eval", "examples/inspect_task.py", "--model", "openai-api/lane/checkpoint"]
    command += ["--log-dir", str(tmp_path), "--log-format", "json", "--display", "none"]
    environment = {**os.environ, "LANE_BASE_URL": f"{serving.url}/v1", "LANE_API_KEY": "none"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    [log] = tmp_path.glob("*.json")
    told = json.loads(log.read_text())
    assert told["status"] == "success", done.stdout + done.stderr
    assert told["results"]["completed_samples"] == len(told["samples"]) == 4
    with lane(serving.url) as http:
        for sample in told["samples"]:
            messages = [{"role": "user", "content": sample["input"]}]
            asked = {"model": "any", "messages": messages, "max_tokens": 8, "temperature": 0}
            chat = http.post("/v1/chat/completions", json=asked)
            assert chat.headers["X-Router-Weights"] == live.client.serving(point.id).weight_version
            assert sample["output"]["completion"] == chat.json()["choices"][0]["message"]["content"]


def test_a_lane_of_the_controllers_is_refused_and_one_that_was_closed_is_gone(live: Live, point: PointView) -> None:
    view = live.client.serve(point.id, for_s=300.0)
    lanes = view.url.removesuffix(point.id)
    work = Work(live, "evaluated", "slow")
    live.client.pause(work.run)
    work.begin()
    [waiting] = live.points(work.run)
    with pytest.raises(Conflict, match="wait until it has ended"):
        live.client.serve(waiting.id)
    live.client.resume(work.run)

    def elsewhere() -> bool:
        newest = live.points(work.run)[-1].id
        return httpx.post(f"{lanes}{newest}/v1/chat/completions", json=CHAT, timeout=60.0).status_code == 409

    work.until(elsewhere, "the running point to be known as the controller's")
    work.whole()
    ended = live.client.end_serving(point.id)
    assert not ended.open

    def gone() -> bool:
        return httpx.post(f"{view.url}/v1/chat/completions", json=CHAT, timeout=60.0).status_code == 410

    wait_for(gone, "the lane to be gone")
    _await_end(live, point)


def test_points_are_evaluated_beside_a_lane_that_people_use(live: Live, point: PointView, serving: ServingView) -> None:
    step = 10
    _dispatch(live, step)
    with lane(serving.url) as http:

        def asked_until_done() -> bool:
            assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
            return any(found.step == step and found.state is DONE for found in live.points(RUN))

        wait_for(asked_until_done, "the point beside it")


@pytest.mark.destructive
def test_a_proxy_killed_comes_back_at_its_port_and_serves_what_it_served(
    live: Live, point: PointView, serving: ServingView
) -> None:
    killed = live.replica("proxy")
    killed.kill()
    wait_for(lambda: not alive(killed), "its end")

    def answers() -> bool:
        try:
            return httpx.post(f"{serving.url}/v1/chat/completions", json=CHAT, timeout=60.0).status_code == 200
        except httpx.TransportError:
            return False

    wait_for(answers, "the proxy to come back")
