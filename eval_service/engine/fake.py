"""The fake engine: a process with SGLang's routes, and knobs for every fault that the service must survive.

It reads the safetensors bytes that it is told to load; their digest decides its log-probs and its answers, so pins are
truly proven or refused. `fake_answers.json` in a model's directory ({prompt: answer}) lets a test say what that model
knows. One suite runs against this and against real SGLang (tests/integration/test_engine_contract.py).

The boot comes over standard input: {model, host, port, knobs, api_key, admin_api_key}. `POST /_knobs` (admin key) turns
knobs at run time; who has no key leaves `<pid>-<any>.json` ({knob, value, times}) in the directory that `orders` names.
A knob turned so is off again once it has been felt so many times, and each time is a line in `<pid>.felt`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from eval_service.contract.errors import SnapshotFault
from eval_service.engine.fake_weights import (
    ANSWERS,
    ends_sglang,
    fake_canary,
    fake_logprobs,
    fake_text,
    read_weights,
)

__all__ = ["ANSWERS", "FakeEngine", "Knobs", "Orders", "fake_canary", "fake_logprobs", "fake_text", "read_weights"]

_LOOK_S = 0.05
_OPEN = ("/health", "/ready", "/metrics")
_NORMAL = (
    *("/generate", "/model_info", "/server_info", "/v1/models"),
    *("/v1/completions", "/v1/chat/completions", "/health_generate"),
)


@dataclass(slots=True)
class Knobs:
    """What a test may turn; durations in seconds."""

    boot_s: float = 0.0  # before it listens
    boot_fails: bool = False  # ends before it listens
    latency_s: float = 0.0  # of each /generate
    update_s: float = 0.0  # of each /update_weights_from_disk
    health_s: float = 0.0  # of each /health
    paused_health_s: float = 20.0  # of a /health in a pause, which ends with 503
    paused_by_update: bool = False  # from the next update on, generation waits for ever
    hang: bool = False  # nothing is ever answered
    unavailable: bool = False  # 503 to everything but /health and /_knobs
    die: bool = False  # the process ends at the next request
    die_on_update: bool = False
    refuse_update: bool = False  # 400
    stale_label: bool = False  # the update loads, and the label stays what it was
    wrong_weights: bool = False  # the update takes the label, and loads nothing
    noise: float = 0.0  # nats, added to every log-prob
    checksums: bool = False  # /weights_checker answers, as with CUDA
    stale_samples: bool = False  # /generate tells the label before last
    orders: str = ""  # a directory to look for orders in

    def turn(self, changes: dict[str, Any]) -> None:
        """Set some of them.

        Raises:
            ValueError: there is no such knob.
        """
        names = {field.name for field in dataclasses.fields(self)}
        for name, value in changes.items():
            if name not in names:
                raise ValueError(f"no such knob: {name}; there are {sorted(names)}")
            setattr(self, name, value)


class Orders:
    """Knobs turned by files, each for so many times; 0 times takes an order back."""

    def __init__(self, directory: Path, knobs: Knobs) -> None:
        self._directory = directory
        self._knobs = knobs
        self._usual: dict[str, Any] = {}
        self._left: dict[str, int] = {}

    async def obey(self) -> None:
        """Look for orders for ever; one is taken by removing its file."""
        while True:
            for path in sorted(self._directory.glob(f"{os.getpid()}-*.json")):
                with contextlib.suppress(FileNotFoundError):  # whoever gave it may have taken it back
                    order = json.loads(path.read_text())
                    path.unlink()
                    self._take(**order)
            await asyncio.sleep(_LOOK_S)

    def felt(self, knob: str) -> None:
        """A knob did something; one that was ordered is turned back after its last time."""
        if knob not in self._left:
            return
        with (self._directory / f"{os.getpid()}.felt").open("a") as file:
            file.write(f"{knob}\n")
        self._left[knob] -= 1
        if self._left[knob] <= 0:
            self._turn_back(knob)

    def _take(self, knob: str, value: Any, times: int) -> None:
        self._turn_back(knob)
        if times > 0:
            self._usual[knob], self._left[knob] = getattr(self._knobs, knob), times
            self._knobs.turn({knob: value})

    def _turn_back(self, knob: str) -> None:
        if self._left.pop(knob, None) is not None:
            self._knobs.turn({knob: self._usual.pop(knob)})


class FakeEngine:
    """The state of one fake server, and its routes."""

    def __init__(self, boot: dict[str, Any]) -> None:
        self.knobs = Knobs()
        self.knobs.turn(boot.get("knobs") or {})
        self._keys = (boot["api_key"], boot["admin_api_key"])
        config = json.loads((Path(boot["model"]) / "config.json").read_text())
        self._vocab_size, self._hidden_size = int(config["vocab_size"]), int(config.get("hidden_size", 0))
        self._context = int(config["max_position_embeddings"])
        self._model_path = str(boot["model"])
        self._weights = read_weights(Path(boot["model"]))
        self._labels = ["default", "default"]
        self._idle = asyncio.Event()
        self._idle.set()
        self._abort = asyncio.Event()
        self._in_flight = 0
        self._updating = asyncio.Lock()
        self._paused = False
        self._going = asyncio.Event()
        self._going.set()
        self.orders = Orders(Path(self.knobs.orders), self.knobs) if self.knobs.orders else None

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[self._gate], client_max_size=64 << 20)
        ok = self._ok
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/health_generate", ok),
                web.get("/ready", ok),
                web.get("/metrics", ok),
                web.get("/model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.get("/v1/models", self._models),
                web.post("/generate", self._generate),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.post("/update_weights_from_disk", self._update),
                web.post("/flush_cache", ok),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/abort_request", self._abort_request),
                web.post("/weights_checker", self._checksum),
                web.post("/_knobs", self._turn),
            ]
        )
        return app

    @web.middleware
    async def _gate(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not request.path.startswith(_OPEN):
            key = self._keys[0] if request.path in _NORMAL else self._keys[1]
            if request.headers.get("authorization") != f"Bearer {key}":
                return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path != "/_knobs":
            if self._bites("die"):
                os._exit(1)
            if self._bites("hang"):
                await asyncio.Event().wait()
            if not request.path.startswith(_OPEN) and self._bites("unavailable"):
                return web.json_response({"error": "unavailable"}, status=503)
        return await handler(request)

    def _bites(self, knob: str) -> bool:
        """Whether a knob is on, now that it matters."""
        on = bool(getattr(self.knobs, knob))
        if on and self.orders is not None:
            self.orders.felt(knob)
        return on

    async def _ok(self, request: web.Request) -> web.Response:
        return web.Response(text="")

    async def _health(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.knobs.health_s)
        if not self._going.is_set():
            await asyncio.sleep(self.knobs.paused_health_s)
            return web.Response(text="", status=503)
        return web.Response(text="")

    async def _pause(self, request: web.Request) -> web.Response:
        self._going.clear()
        self._abort_all()
        return web.Response(text="")

    async def _continue(self, request: web.Request) -> web.Response:
        self._going.set()
        return web.Response(text="")

    async def _turn(self, request: web.Request) -> web.Response:
        try:
            self.knobs.turn(await request.json())
        except ValueError as exc:
            return _refused(str(exc))
        return web.json_response(dataclasses.asdict(self.knobs))

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"model_path": self._model_path, "weight_version": self._labels[-1], "is_generation": True}
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": self._model_path, "context_length": self._context, "version": "fake"})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._model_path, "object": "model"}]})

    async def _abort_request(self, request: web.Request) -> web.Response:
        self._abort_all()
        return web.Response(text="")

    async def _checksum(self, request: web.Request) -> web.Response:
        if (await request.json()).get("action") in ("snapshot", "reset_tensors"):
            return web.json_response({"success": True, "message": "Success."})
        if not self.knobs.checksums:
            return web.json_response({"success": False, "message": "Torch not compiled with CUDA enabled"}, status=400)
        return web.json_response(
            {"success": True, "message": "", "per_engine_checksum": f"sha-{self._weights.tensor_digest}"}
        )

    def _abort_all(self) -> None:
        self._abort.set()
        self._abort = asyncio.Event()

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self._bites("die_on_update"):
            os._exit(1)
        if self._bites("refuse_update"):
            return _update_answer(False, "refused by a knob")
        if body.get("abort_all_requests"):
            self._abort_all()
        async with self._updating:
            await self._idle.wait()
            await asyncio.sleep(self.knobs.update_s)
            try:
                place = Path(body["model_path"])
                weights = await asyncio.to_thread(read_weights, place)
                if ends_sglang(place, vocab_size=self._vocab_size, hidden_size=self._hidden_size):
                    os._exit(1)
            except FileNotFoundError as exc:
                return _update_answer(False, f"Failed to update weights: {exc}.")
            except SnapshotFault:
                os._exit(1)  # as SGLang: its rollback reads the path that it has just set
            self._paused = self._bites("paused_by_update")
            if not self._bites("wrong_weights"):
                self._weights = weights
            self._model_path = body["model_path"]
            if body.get("weight_version") and not self._bites("stale_label"):
                self._labels = [self._labels[-1], body["weight_version"]]
        return _update_answer(True, "Succeeded to update model weights.")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompts, batched = _prompts(body)
        if prompts is None:
            return _refused("Either text, input_ids or input_embeds should be provided.")
        wanted = int((body.get("sampling_params") or {}).get("max_new_tokens") or 128)
        for prompt in prompts:
            if not isinstance(prompt, str) and max(prompt) >= self._vocab_size:
                os._exit(1)  # as SGLang
            if len(_tokens(prompt)) + wanted > self._context or len(_tokens(prompt)) >= self._context:
                return _refused(f"The input is longer than the model's context length ({self._context} tokens).")
        await self._going.wait()
        async with self._updating:
            self._in_flight += 1
            self._idle.clear()
        try:
            if self._paused:
                await asyncio.Event().wait()
            aborted = await self._held_up()
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()
        n = int((body.get("sampling_params") or {}).get("n") or 1)
        answers = [self._answer(prompt, wanted, body, aborted=aborted) for prompt in prompts for _ in range(n)]
        if body.get("stream"):
            return await _streamed(request, answers[0])
        return web.json_response(answers if batched or n > 1 else answers[0])

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        answer = self._answer(body["prompt"], int(body.get("max_tokens") or 16), body, aborted=False)
        choice = {"index": 0, "text": answer["text"], "finish_reason": answer["meta_info"]["finish_reason"]["type"]}
        return web.json_response({"object": "text_completion", "model": body.get("model"), "choices": [choice]})

    async def _chat(self, request: web.Request) -> web.Response:
        return _refused("a fake has no chat template")

    async def _held_up(self) -> bool:
        """Take as long as the knob says; whether it was aborted meanwhile."""
        latency_s = self.knobs.latency_s
        if not self._bites("latency_s"):
            return False
        try:
            async with asyncio.timeout(latency_s):
                await self._abort.wait()
        except TimeoutError:
            return False
        return True

    def _answer(self, prompt: str | list[int], wanted: int, body: dict[str, Any], *, aborted: bool) -> dict[str, Any]:
        ids = _tokens(prompt)
        text = "" if aborted else self._text(prompt, body)
        output = list(text.encode())[:wanted]
        finish: dict[str, Any] = {"type": "stop", "matched": 1}
        if aborted:
            finish = {"type": "abort", "message": "Abort before prefill"}
        elif len(text.encode()) > wanted:
            finish = {"type": "length", "length": wanted}
        meta: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "finish_reason": finish,
            "prompt_tokens": len(ids),
            "completion_tokens": len(output),
            "cached_tokens": 0,
            "weight_version": self._labels[0] if self._bites("stale_samples") else self._labels[-1],
            "e2e_latency": max(self.knobs.latency_s, 1e-4),
            "request_received_ts": time.time(),
        }
        if body.get("return_logprob"):
            rows = [None, *(value + self.knobs.noise for value in fake_logprobs(self._weights.tensor_digest, ids))]
            given = int(body.get("logprob_start_len", -1))
            start = given if given >= 0 else len(ids)
            meta["input_token_logprobs"] = [[row, token, None] for row, token in zip(rows, ids, strict=True)][start:]
            meta["output_token_logprobs"] = [[-0.5, token, None] for token in output]
        return {"text": bytes(output).decode(errors="replace"), "output_ids": output, "meta_info": meta}

    def _text(self, prompt: str | list[int], body: dict[str, Any]) -> str:
        """A seed changes what it makes up, if its choice is not greedy."""
        asked = body.get("sampling_params") or {}
        if isinstance(prompt, str) and prompt in self._weights.answers:
            return self._weights.answers[prompt]
        seed = asked.get("sampling_seed") if asked.get("temperature") else None
        return fake_text(self._weights.tensor_digest, prompt if seed is None else f"{prompt}:{seed}")


async def _streamed(request: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
    """Server-sent events, each with the text so far."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for end in range(1, len(answer["text"]) + 1):
        await response.write(f"data: {json.dumps({**answer, 'text': answer['text'][:end]})}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def _prompts(body: dict[str, Any]) -> tuple[list[str | list[int]] | None, bool]:
    """The prompts of a request, and whether it was a batch."""
    given = body.get("text") if body.get("text") is not None else body.get("input_ids")
    if not given:
        return None, False
    batched = isinstance(given, list) and not isinstance(given[0], int)
    return (list(given) if batched else [given]), batched


def _tokens(prompt: str | list[int]) -> list[int]:
    return list(prompt.encode()) if isinstance(prompt, str) else prompt


def _refused(message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=400)


def _update_answer(success: bool, message: str) -> web.Response:
    body = {"success": success, "message": message, "num_paused_requests": 0}
    return web.json_response(body, status=200 if success else 400)


async def _serve(boot: dict[str, Any]) -> None:
    engine = FakeEngine(boot)
    if engine.knobs.boot_fails:
        raise SystemExit("a knob says that the boot fails")
    await asyncio.sleep(engine.knobs.boot_s)
    runner = web.AppRunner(engine.app(), access_log=None, shutdown_timeout=0.0)
    await runner.setup()
    await web.TCPSite(runner, boot["host"], boot["port"]).start()
    if engine.orders is not None:
        await engine.orders.obey()
    await asyncio.Event().wait()


def main() -> None:
    """Read the boot and serve until the process is ended."""
    asyncio.run(_serve(json.loads(sys.stdin.read())))


if __name__ == "__main__":
    main()
