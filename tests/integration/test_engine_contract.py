"""One suite against the fake engine and against real SGLang on the CPU: what keeps the fake honest."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from eval_service.contract.canary import canary_token_ids
from eval_service.contract.manifest import Canary
from eval_service.contract.states import PinProof
from eval_service.engine.errors import EngineDown, EngineRefused
from eval_service.engine.fake import fake_canary
from eval_service.engine.pin import PinFailed, SystemClock
from eval_service.engine.protocol import PinError, PinOrder
from eval_service.engine.server import BootOptions, Server, boot_server
from eval_service.fleet_config import GroupConfig
from eval_service.functions import SAMPLES, EvalContext
from eval_service.suites.config import SamplingConfig
from eval_service.suites.datasets import Prompt
from eval_service.suites.generation import parse_answer, request_for
from eval_service.suites.kinds import FunctionSuite
from eval_service.suites.suite import load_suites
from tests.support.engine_model import (
    CONTEXT,
    VOCAB_SIZE,
    TinyModel,
    make_model,
    odd_model,
    reference_canary,
    truncated,
)
from tests.support.processes import assert_gone, tree

pytestmark = pytest.mark.timeout(330)  # a real engine starts within 10 s of a core, of which a busy machine has little
IDS = list(range(5, 25))


@dataclass(frozen=True, slots=True)
class Served:
    """An engine that is up, two models, and the loop that its connections live on."""

    grade: str
    server: Server
    loop: asyncio.Runner
    boot: TinyModel
    other: TinyModel

    def call(self, method: str, path: str, body: Any = None, *, key: str | None = "api") -> httpx.Response:
        """One raw call."""
        held = {"api": self.server.keys.api, "admin": self.server.keys.admin}
        headers = {"authorization": f"Bearer {held.get(key, key)}"} if key else {}
        return httpx.request(method, self.server.url + path, json=body, headers=headers, timeout=60, trust_env=False)

    def generate(self, **body: Any) -> httpx.Response:
        """POST /generate."""
        return self.call("POST", "/generate", body)

    def load(self, path: Path, **body: Any) -> httpx.Response:
        """POST /update_weights_from_disk, once it has put away what it answered last."""
        assert self.call("POST", "/flush_cache?timeout=50", key="admin").status_code == 200
        return self.call("POST", "/update_weights_from_disk", {"model_path": str(path), **body}, key="admin")

    def label(self) -> str:
        """What /model_info says."""
        return str(self.call("GET", "/model_info").json()["weight_version"])

    def logprobs(self) -> list[float]:
        """Of a fixed sequence."""
        return self.loop.run(self.server.api.input_logprobs(IDS))

    def canary(self, model: TinyModel) -> Canary:
        """What the exporter of that model would have written."""
        if self.grade == "fake":
            return fake_canary(model.manifest.tensor_digest, canary_token_ids(VOCAB_SIZE))
        return reference_canary(model.path)


@pytest.fixture(scope="module", params=["fake", pytest.param("sglang-cpu", marks=pytest.mark.real)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("contract")
    boot, other = make_model(root / "boot", seed=1), make_model(root / "other", seed=2)
    group = GroupConfig.model_validate({"model": boot.path, "grade": request.param})
    with asyncio.Runner() as loop:
        server = loop.run(boot_server(group, BootOptions(log=root / "engine.log"), SystemClock()))
        try:
            yield Served(request.param, server, loop, boot, other)
        finally:
            loop.run(server.stop())


def test_a_boot_has_the_default_label_and_health_is_open(served: Served) -> None:
    assert served.label() == "default"
    assert served.call("GET", "/health", key=None).status_code == 200
    assert served.call("GET", "/metrics", key=None).status_code == 200


def test_generate_tells_tokens_label_and_why_it_ended(served: Served) -> None:
    answer = served.generate(input_ids=IDS, sampling_params={"max_new_tokens": 4, "temperature": 0.0}).json()
    meta = answer["meta_info"]
    assert isinstance(answer["text"], str)
    assert meta["prompt_tokens"] == len(IDS)
    assert 1 <= meta["completion_tokens"] <= 4
    assert meta["finish_reason"]["type"] in ("length", "stop")
    assert meta["weight_version"] == served.label()
    assert meta["e2e_latency"] > 0


def test_generate_takes_text_and_batches(served: Served) -> None:
    parameters = {"max_new_tokens": 2, "temperature": 0.0}
    answers = served.generate(text=["ab", "cd"], sampling_params=parameters).json()
    assert [set(answer) >= {"text", "meta_info"} for answer in answers] == [True, True]
    assert isinstance(served.generate(text="ab", sampling_params=parameters).json()["text"], str)


def test_greedy_answers_and_log_probs_repeat_exactly(served: Served) -> None:
    parameters = {"max_new_tokens": 4, "temperature": 0.0}
    first, second = (served.generate(input_ids=IDS, sampling_params=parameters).json()["text"] for _ in range(2))
    assert first == second
    assert served.logprobs() == served.logprobs()


def test_input_log_probs_start_with_none_and_name_the_tokens(served: Served) -> None:
    body = {"input_ids": IDS, "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 1}}
    rows = served.call("POST", "/generate", body).json()["meta_info"]["input_token_logprobs"]
    assert [row[1] for row in rows] == IDS
    assert rows[0][0] is None
    assert all(row[0] < 0 for row in rows[1:])


def test_what_a_suite_asks_of_a_sample_is_taken_and_read(served: Served) -> None:
    """A seed and the log-probs of the output, and of nothing else."""
    sampling = SamplingConfig(temperature=1.0, max_new_tokens=4, n=2, logprob=True)
    asked = request_for(Prompt(0, "d", "", "", tuple(IDS)), sampling, seed=2**31 - 1, vocab_size=VOCAB_SIZE)
    response = served.call("POST", "/generate", asked)
    generated = parse_answer(response.status_code, response.content)
    rows = response.json()["meta_info"]["output_token_logprobs"]
    assert len(rows) == generated.output_tokens
    assert generated.logprob == pytest.approx(sum(row[0] for row in rows))
    assert generated.logprob is not None
    assert generated.logprob < 0
    assert response.json()["meta_info"].get("input_token_logprobs", []) == []


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [5] * (CONTEXT + 1), "sampling_params": {"max_new_tokens": 1}},
        {"input_ids": [5] * 10, "sampling_params": {"max_new_tokens": CONTEXT}},
        {"sampling_params": {"max_new_tokens": 1}},
    ],
    ids=["prompt over the context", "prompt and answer over the context", "no input"],
)
def test_a_request_that_cannot_be_is_400_and_harms_nothing(served: Served, body: dict[str, Any]) -> None:
    assert served.call("POST", "/generate", body).status_code == 400
    assert served.generate(input_ids=IDS, sampling_params={"max_new_tokens": 1}).status_code == 200


def test_generating_needs_the_key_and_changing_weights_the_admin_key(served: Served) -> None:
    body = {"model_path": str(served.other.path), "weight_version": "stolen"}
    for key in (None, "wrong"):
        assert served.call("POST", "/generate", {"input_ids": IDS}, key=key).status_code == 401
        assert served.call("GET", "/model_info", key=key).status_code == 401
    for key in (None, "wrong", "api"):
        assert served.call("POST", "/update_weights_from_disk", body, key=key).status_code == 401
        assert served.call("POST", "/abort_request", {"abort_all": True}, key=key).status_code == 401
        assert served.call("POST", "/flush_cache", key=key).status_code == 401
    assert served.label() != "stolen"


def test_an_update_changes_weights_and_label(served: Served) -> None:
    served.load(served.boot.path, weight_version="before")
    before = served.logprobs()
    answer = served.load(served.other.path, weight_version="after")
    assert (answer.status_code, answer.json()["success"]) == (200, True)
    assert served.label() == "after"
    assert served.logprobs() != before
    meta = served.generate(input_ids=IDS, sampling_params={"max_new_tokens": 1}).json()["meta_info"]
    assert meta["weight_version"] == "after"


def test_an_update_with_no_label_keeps_the_old_one_though_the_weights_change(served: Served) -> None:
    served.load(served.boot.path, weight_version="before")
    before = served.logprobs()
    assert served.load(served.other.path).status_code == 200
    assert served.label() == "before"
    assert served.logprobs() != before


def test_an_update_from_nowhere_is_400_and_keeps_what_was(served: Served, tmp_path: Path) -> None:
    served.load(served.boot.path, weight_version="kept")
    before = served.logprobs()
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((served.boot.path / "config.json").read_text())
    for path in (tmp_path / "absent", empty):
        answer = served.load(path, weight_version="bad")
        assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert served.label() == "kept"
    assert served.logprobs() == before


def test_an_update_with_a_tensor_missing_is_200_with_the_new_label(served: Served, tmp_path: Path) -> None:
    short = make_model(tmp_path / "short", seed=3, without=["model.layers.0.mlp.up_proj.weight"])
    assert served.load(short.path, weight_version="wrongly-new").status_code == 200
    assert served.label() == "wrongly-new"


def test_abort_ends_what_is_in_flight_with_200(served: Served) -> None:
    if served.grade == "fake":
        served.call("POST", "/_knobs", {"latency_s": 30.0}, key="admin")
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 230, "temperature": 0.0, "ignore_eos": True}}

    async def ended() -> str:
        request = asyncio.create_task(served.server.api.generate(body))
        while not (await asyncio.wait((request,), timeout=0.02))[0]:
            await served.server.api.abort_all()
        return str(request.result()["meta_info"]["finish_reason"]["type"])

    async def aborted() -> None:
        async with asyncio.timeout(60):
            while await ended() != "abort":  # it was over before anybody came to abort it, which says nothing
                assert served.grade != "fake"

    served.loop.run(aborted())
    if served.grade == "fake":
        served.call("POST", "/_knobs", {"latency_s": 0.0}, key="admin")


def test_flush_cache_answers_and_checksums_are_for_cuda(served: Served) -> None:
    assert served.call("POST", "/flush_cache?timeout=50", key="admin").status_code == 200
    with pytest.raises(EngineRefused, match="CUDA"):
        served.loop.run(served.server.api.weights_checksum())


def _order(model: TinyModel, canary: Canary | None, label: str) -> PinOrder:
    return PinOrder(str(model.path), model.with_canary(canary), label, timeout_s=60.0, visibility_timeout_s=1.0)


def test_a_pin_is_proven_by_the_trainers_canary(served: Served) -> None:
    pinner = served.server.pinner
    first = served.loop.run(pinner.pin(_order(served.boot, served.canary(served.boot), "boot.1")))
    second = served.loop.run(pinner.pin(_order(served.other, served.canary(served.other), "other.1")))
    assert first.canary_diff is not None
    assert second.canary_diff is not None
    assert max(first.canary_diff, second.canary_diff) < 2e-6
    assert first.fingerprint != second.fingerprint
    assert served.label() == "other.1"
    again = served.loop.run(pinner.pin(_order(served.boot, None, "boot.2")))
    assert again.fingerprint == first.fingerprint
    assert again.canary_diff is None


def test_the_canary_of_other_weights_fails_the_pin(served: Served) -> None:
    with pytest.raises(PinFailed) as caught:
        served.loop.run(served.server.pinner.pin(_order(served.boot, served.canary(served.other), "boot.3")))
    assert caught.value.error is PinError.CANARY


def test_no_prefix_that_was_cached_survives_a_pin(served: Served) -> None:
    asked_by_a_pin = {row[0] for row in canary_token_ids(VOCAB_SIZE)}
    ids = [next(token for token in IDS if token not in asked_by_a_pin), *IDS]

    def cached() -> int:
        answer = served.generate(input_ids=ids, sampling_params={"max_new_tokens": 1}).json()
        return int(answer["meta_info"]["cached_tokens"])

    cached()
    assert cached() > 0 or served.grade == "fake"
    served.loop.run(served.server.pinner.pin(_order(served.other, None, "cache.1")))
    assert cached() == 0


def test_no_key_stands_in_a_command_line_or_in_the_log(served: Served) -> None:
    pid = served.server.process.server_pid
    assert pid is not None
    keys = (served.server.keys.api, served.server.keys.admin)
    for name in ("cmdline", "environ"):
        text = Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
        assert not any(key in text for key in keys)
    log = served.boot.path.parent / "engine.log"
    assert not any(key in log.read_text() for key in keys)


@pytest.mark.parametrize(
    "path", ["/health", "/health_generate", "/model_info", "/server_info", "/v1/models", "/metrics"]
)
def test_what_is_read_of_an_engine_is_200(served: Served, path: str) -> None:
    assert served.call("GET", path).status_code == 200


def test_n_and_seed_are_taken_and_one_answer_comes_for_each(served: Served) -> None:
    answers = served.generate(text="ab", sampling_params={"n": 2, "max_new_tokens": 2, "sampling_seed": 7}).json()
    assert len(answers) == 2
    assert all(answer["meta_info"]["weight_version"] == served.label() for answer in answers)


def test_a_stream_is_events_of_the_text_so_far_and_ends_with_done(served: Served) -> None:
    parameters = {"max_new_tokens": 3, "temperature": 0.0}
    whole = served.generate(text="ab", sampling_params=parameters).json()
    lines = served.generate(text="ab", sampling_params=parameters, stream=True).text.split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert last["text"] == whole["text"]
    assert last["meta_info"]["weight_version"] == served.label()


def test_completions_are_answered_and_chat_without_a_template_is_400(served: Served) -> None:
    body = {"model": "any", "prompt": "ab", "max_tokens": 3, "temperature": 0.0}
    text = served.generate(text="ab", sampling_params={"max_new_tokens": 3, "temperature": 0.0}).json()["text"]
    assert served.call("POST", "/v1/completions", body).json()["choices"][0]["text"] == text
    chat = {"model": "any", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 3}
    assert served.call("POST", "/v1/chat/completions", chat).status_code == 400


def test_a_pause_and_its_end_are_200_and_it_generates_afterwards(served: Served) -> None:
    assert served.call("POST", "/pause_generation", {"mode": "abort"}, key="admin").status_code == 200
    assert served.call("POST", "/continue_generation", {}, key="admin").status_code == 200
    assert served.generate(text="ab", sampling_params={"max_new_tokens": 1}).status_code == 200


def test_the_weights_checker_takes_and_resets_tensors_anywhere_and_compares_with_cuda_alone(served: Served) -> None:
    answers = [
        served.call("POST", "/weights_checker", {"action": action}, key="admin").status_code
        for action in ("snapshot", "compare", "checksum", "reset_tensors")
    ]
    assert answers == [200, 400, 400, 200]
    assert served.load(served.boot.path, weight_version="loaded anew").status_code == 200
    assert served.generate(text="ab", sampling_params={"max_new_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "what",
    ["a tensor renamed", "a tensor too many", "values that are not finite", "another hidden_size", "a short linear"],
)
def test_an_update_that_cannot_be_right_is_200_with_the_new_label(served: Served, what: str, tmp_path: Path) -> None:
    """Why nothing that an engine answers is proof, and why snapshots are checked before one is asked."""
    bad = odd_model(tmp_path / "odd", what)
    assert served.load(bad, weight_version=what).status_code == 200
    assert served.label() == what
    assert served.load(served.boot.path, weight_version="sound").status_code == 200
    assert served.generate(text="ab", sampling_params={"max_new_tokens": 1}).status_code == 200


def test_the_example_of_an_eval_function_pins_a_server_of_somebody_elses_and_proves_it(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = Path(__file__).resolve().parents[2] / "examples/suites"
    suite = load_suites(examples / "function.toml")["attached"]
    assert isinstance(suite, FunctionSuite)
    monkeypatch.syspath_prepend(str(examples))
    module, _, attached = suite.config.function.partition(":")
    rows = (examples / suite.config.options["questions"]).read_text().splitlines()
    asked = [json.loads(row)["prompt"] for row in rows]
    for name, key in (("key", served.server.keys.api), ("admin", served.server.keys.admin)):
        (tmp_path / name).write_text(key)
    files = {"key_file": str(tmp_path / "key"), "admin_key_file": str(tmp_path / "admin")}
    options = suite.config.options | {"url": served.server.url} | files
    function = getattr(importlib.import_module(module), attached)(**options)
    try:
        canary = served.canary(served.other).model_dump()
        context = EvalContext("r", 1, "mine", "point", tmp_path, canary=canary)
        function.evaluate_checkpoint(served.other.path, context)
        assert (context.pin_proof, context.weight_version) == (PinProof.CANARY, served.label())
        assert (context.metrics[suite.config.metric].value, context.metrics[suite.config.metric].n) == (0.0, len(asked))
        samples = [json.loads(line) for line in (tmp_path / SAMPLES).read_text().splitlines()]
        sampling = {"max_new_tokens": suite.config.options["max_new_tokens"], "temperature": 0.0}
        own = [served.generate(text=text, sampling_params=sampling).json()["text"] for text in asked]
        assert [sample["output"] for sample in samples] == own
        with pytest.raises(RuntimeError, match="it holds other weights"):
            function.evaluate_checkpoint(served.boot.path, context)
    finally:
        function.dispose()


def test_sigterm_ends_an_idle_server_by_itself_with_all_that_it_started(served: Served) -> None:
    """The last of this engine. Real ones take 6 s, after a failed health check a minute: nobody waits for more than a
    grace.
    """
    process = served.server.process
    assert process.server_pid is not None
    family = tree(process.server_pid)
    os.kill(process.server_pid, signal.SIGTERM)
    served.loop.run(asyncio.wait_for(process.exited.wait(), 90))
    assert_gone(family)


@dataclass(frozen=True, slots=True)
class Doomed:
    """An engine for each way to end one; the first of them stood paused while the other started."""

    engines: dict[str, Served]
    while_paused: list[int]  # what it answered: to the pause, /health, the end of the pause, /health, /generate


@pytest.fixture(scope="module", params=["fake", pytest.param("sglang-cpu", marks=pytest.mark.real)])
def doomed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doomed]:
    root = tmp_path_factory.mktemp("doomed")
    boot = make_model(root / "boot", seed=1)
    knobs = {"overrides": {"paused_health_s": 0.1}} if request.param == "fake" else {}
    group = GroupConfig.model_validate({"model": boot.path, "grade": request.param, **knobs})
    engines: dict[str, Served] = {}
    with asyncio.Runner() as loop:

        async def start(what: str) -> None:
            server = await boot_server(group, BootOptions(log=root / f"{what}.log"), SystemClock())
            engines[what] = Served(request.param, server, loop, boot, boot)

        async def start_all() -> list[int]:
            await start(_ENDS[0])
            paused = asyncio.to_thread(_answers_while_paused, engines[_ENDS[0]])
            others = asyncio.gather(*(start(what) for what in _ENDS[1:]))
            answers, _ = await asyncio.gather(paused, others)
            return answers

        try:
            yield Doomed(engines, loop.run(start_all()))
        finally:
            for engine in engines.values():
                loop.run(engine.server.stop())


_ENDS = ("a short norm", "a token id beyond the vocabulary", "a truncated shard")


def _answers_while_paused(engine: Served) -> list[int]:
    calls: tuple[tuple[str, str, Any, str | None], ...] = (
        ("POST", "/pause_generation", {"mode": "abort"}, "admin"),
        ("GET", "/health", None, None),
        ("POST", "/continue_generation", {}, "admin"),
        ("GET", "/health", None, None),
        ("POST", "/generate", {"text": "ab", "sampling_params": {"max_new_tokens": 1}}, "api"),
    )
    return [engine.call(method, path, body, key=key).status_code for method, path, body, key in calls]


@pytest.mark.destructive
@pytest.mark.timeout(930)  # three real engines start
def test_health_answers_503_in_a_pause_which_is_no_death(doomed: Doomed) -> None:
    assert doomed.while_paused == [200, 503, 200, 200, 200]


@pytest.mark.destructive
def test_a_norm_or_embedding_of_the_wrong_shape_ends_the_server(doomed: Doomed, tmp_path: Path) -> None:
    """It drops the connection, and does not come back."""
    engine = doomed.engines["a short norm"]
    bad = odd_model(tmp_path / "odd", "a short norm")
    with pytest.raises(EngineDown):
        engine.loop.run(engine.server.api.update_weights_from_disk(str(bad), "bad", timeout_s=60))
    engine.loop.run(asyncio.wait_for(engine.server.process.exited.wait(), 30))


@pytest.mark.destructive
def test_a_token_id_beyond_the_vocabulary_ends_the_server(doomed: Doomed) -> None:
    engine = doomed.engines["a token id beyond the vocabulary"]
    with pytest.raises(httpx.TransportError):
        engine.generate(input_ids=[VOCAB_SIZE], sampling_params={"max_new_tokens": 1})
    engine.loop.run(asyncio.wait_for(engine.server.process.exited.wait(), 30))


@pytest.mark.destructive
def test_a_truncated_shard_ends_the_server_and_its_pin_has_died(doomed: Doomed, tmp_path: Path) -> None:
    """A file that is as short as its manifest says is loaded: only the checks of its content could have told."""
    engine = doomed.engines["a truncated shard"]
    short = truncated(engine.boot, tmp_path / "short")
    with pytest.raises(PinFailed) as caught:
        engine.loop.run(engine.server.pinner.pin(_order(short, None, "short.1")))
    assert caught.value.error is PinError.DIED
    engine.loop.run(asyncio.wait_for(engine.server.process.exited.wait(), 30))
