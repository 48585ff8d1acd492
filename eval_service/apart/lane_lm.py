"""lm-eval's model over a lane of the proxy: SGLang's own `/generate`, by token ids.

Invariants: an answer counts only under the pinned `weight_version`; what the proxy can't serve now is asked again (it
replays what a dying engine had), and what it refuses ends the evaluation. Tokens are made, and cut, as lm-eval's `hf`
backend does with the same `max_length`, so that both ask the same; what a prompt lost at its beginning is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import AutoConfig, AutoTokenizer

_AGAIN = (429, 500, 502, 503, 504)
_PAUSE_S = 0.5
_REQUEST_S = 900.0
_TRIES = 20  # of one request that was answered, with no use
_SPARE = 8  # tokens: what comes nearer to its context SGLang refuses, or makes fewer tokens than were asked for


class LaneLost(Exception):
    """The lane has no answers to give: an infrastructure fault."""


@dataclass(frozen=True, slots=True)
class Told:
    """What an engine said of one request."""

    engine: str
    weight_version: str
    prompt_tokens: int
    output_tokens: int
    finish_reason: str | None
    latency_s: float
    cut: int = 0  # tokens that its prompt lost at its beginning


class LaneLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """See the module's docstring. `told` are the answers' circumstances, by the request's arguments."""

    def __init__(
        self, snapshot: str, url: str, weight_version: str, *, concurrency: int, key: str | None = None,
        context: int | None = None, progress: Callable[[int, int, float], None] = lambda total, done, seconds: None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokenizer = AutoTokenizer.from_pretrained(snapshot, trust_remote_code=False)
        config = AutoConfig.from_pretrained(snapshot, trust_remote_code=False)
        self._vocab_size, longest = int(config.vocab_size), int(config.max_position_embeddings)
        self.context = min(context or longest, longest)
        self.max_length = self.context - _SPARE
        self._weight_version, self._progress = weight_version, progress
        headers = {"authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self._http = httpx.Client(base_url=url, headers=headers, timeout=_REQUEST_S, limits=limits, trust_env=False)
        self._pool = ThreadPoolExecutor(concurrency)
        self.told: dict[tuple[Any, ...], Told] = {}
        self._total = self._done = 0

    # --- what lm-eval asks

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is replaced by."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        """Of lm-eval's cache keys."""
        return str(self.tokenizer.name_or_path)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """By the snapshot's own template."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """As the `hf` backend does for causal models."""
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **special))

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self._all(requests, self._likelihood)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows that do not overlap."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            for window in map(make_disjoint_window, rolling):
                windows.append((None, *window))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._all(windows, self._likelihood), strict=True):
            sums[owner] += value
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts, up to the task's stop strings."""
        return self._all([request.args for request in requests], self._generate)

    # --- one request

    def _likelihood(self, request: tuple[Any, list[int], list[int]]) -> tuple[float, bool]:
        arguments, context, continuation = request
        if not 0 < len(continuation) <= self.max_length:
            raise ValueError(f"a continuation has {len(continuation)} tokens, not 1 to {self.max_length}")
        ids, cut = _end_of(context + continuation, self.max_length + 1)
        start = len(ids) - len(continuation)
        answer = self._ask(
            {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
                "return_logprob": True,
                "logprob_start_len": max(0, start - 1),
                "top_logprobs_num": 1,
            },
            arguments,
            cut,
        )
        meta, count = answer["meta_info"], len(continuation)
        rows, tops = meta["input_token_logprobs"][-count:], meta["input_top_logprobs"][-count:]
        if [row[1] for row in rows] != continuation:
            raise LaneLost("the log-probs are of other tokens than were asked for")
        greedy = all(top[0][1] == token for top, token in zip(tops, continuation, strict=True))
        return sum(float(row[0]) for row in rows), greedy

    def _generate(self, arguments: tuple[str, dict[str, Any]]) -> str:
        context, given = arguments
        asked = normalize_gen_kwargs(given, 256)
        stop = [text for text in asked.get("until") or [] if text]
        room = int(asked["max_gen_toks"])
        if room >= self.max_length:
            raise ValueError(f"max_gen_toks is {room}, and prompt and answer have {self.max_length} tokens together")
        ids, cut = _end_of(self.tok_encode(context), self.max_length - room)
        sampling: dict[str, Any] = {"max_new_tokens": room, "temperature": 0.0}
        if asked.get("do_sample"):
            sampling["temperature"] = float(asked.get("temperature", 1.0))
            sampling |= {name: asked[name] for name in ("top_p", "top_k") if name in asked}
        # Stop strings are cut by lm-eval's own rule below; the engine only need not go on past them.
        answer = self._ask({"input_ids": ids, "sampling_params": {**sampling, "stop": stop}}, arguments, cut)
        return str(postprocess_generated_text(answer["text"], stop, None))

    def _ask(self, body: dict[str, Any], arguments: Any, cut: int) -> dict[str, Any]:
        if not body["input_ids"] or max(body["input_ids"]) >= self._vocab_size:
            raise ValueError("a request is empty, or has a token beyond the model's vocabulary")
        why = ""
        for _ in range(_TRIES):
            began = time.monotonic()
            try:
                answer = self._http.post("/generate", json=body)
            except httpx.TransportError as exc:
                why = f"{type(exc).__name__}: {exc}"
            else:
                seconds = time.monotonic() - began
                if answer.status_code == 200:
                    found: dict[str, Any] = answer.json()
                    version = found["meta_info"].get("weight_version")
                    if version == self._weight_version:
                        self._note(arguments, cut, found["meta_info"], answer.headers, seconds)
                        return found
                    why = f"it reports weight_version {version!r}"
                elif answer.status_code in _AGAIN:
                    why = answer.text[:300]
                elif answer.status_code in (404, 409, 410):
                    raise LaneLost(answer.text[:300])
                else:
                    raise ValueError(f"a request was refused: {answer.status_code}: {answer.text[:300]}")
            time.sleep(_PAUSE_S)
        raise LaneLost(f"no answer in {_TRIES} tries: {why}")

    def _note(self, arguments: Any, cut: int, meta: dict[str, Any], headers: httpx.Headers, seconds: float) -> None:
        reason = meta.get("finish_reason")
        told = Told(
            engine=headers.get("x-router-upstream", ""),
            weight_version=meta["weight_version"],
            prompt_tokens=meta["prompt_tokens"],
            output_tokens=meta["completion_tokens"],
            finish_reason=reason.get("type") if isinstance(reason, dict) else reason,
            latency_s=seconds,
            cut=cut,
        )
        if arguments is not None:
            self.told[key_of(arguments)] = told
        self._done += 1
        self._progress(self._total, self._done, seconds)

    def _all(self, requests: Sequence[Any], one: Callable[[Any], Any]) -> list[Any]:
        self._total += len(requests)
        self._progress(self._total, self._done, 0.0)
        return list(self._pool.map(one, requests))


def _end_of(ids: list[int], most: int) -> tuple[list[int], int]:
    """The last tokens, and how many are lost before them."""
    lost = max(0, len(ids) - most)
    return ids[lost:], lost


def key_of(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """A request's arguments, to be looked up by."""
    return tuple(repr(part) for part in arguments)
