"""What is sent to SGLang's `/generate`, and what comes back.

Two kinds of trouble: a SampleFault is the sample's own and final (a prompt that the engine refuses); an UnusableAnswer
is infrastructure's, and the sample is run again. Token ids are checked against the vocabulary here, before they are
sent: one beyond it kills the whole engine.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eval_service.contract.errors import EvalfleetError
from eval_service.suites.config import SamplingConfig
from eval_service.suites.datasets import Prompt

# Refusals that say nothing about the sample: a key that is not this server's, a route that is not there, no room.
_NOT_THE_SAMPLES = frozenset({401, 403, 404, 405, 408, 421, 425, 429})


class SampleFault(EvalfleetError):
    """The sample's own error: it would be the same on any engine."""

    code = "sample_fault"
    status = 422


class UnusableAnswer(EvalfleetError):
    """What came is no answer to this sample; it is to be run again."""

    code = "unusable_answer"
    status = 502


@dataclass(frozen=True, slots=True)
class Generated:
    """An engine's answer. `finish_reason` is `stop` or `length`; `output` is the text without the prompt."""

    output: str
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    weight_version: str
    logprob: float | None = None  # sum over the output's tokens, where it was asked for; NaN if one is no number
    likelihoods: tuple[float, ...] = ()  # of the choices, where they are what was asked


def request_for(
    prompt: Prompt, sampling: SamplingConfig, *, seed: int | None = None, vocab_size: int | None = None
) -> dict[str, Any]:
    """The JSON body for `/generate`.

    Args:
        seed: of this sample; SGLang heeds it only under `enable_deterministic_inference`, and takes it anyway.

    Raises:
        SampleFault: token ids outside [0, vocab_size), or given while the vocabulary's size is not known.
    """
    asked: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
    }
    if sampling.stop:
        asked["stop"] = list(sampling.stop)
    if seed is not None:
        asked["sampling_seed"] = seed
    request: dict[str, Any] = {"sampling_params": asked}
    if sampling.logprob:
        request["return_logprob"] = True  # of the output alone: the prompt's would be computed anew
    if prompt.error is not None:
        raise SampleFault(prompt.error)
    if prompt.ids is None:
        return {"text": prompt.text, **request}
    check_ids(prompt.ids, vocab_size)
    return {"input_ids": list(prompt.ids), **request}


def check_ids(ids: tuple[int, ...], vocab_size: int | None) -> None:
    """Refuse token ids that the model has not.

    Raises:
        SampleFault: names the id and its place.
    """
    if vocab_size is None:
        raise SampleFault("the vocabulary's size is not known, so token ids can't be checked", field="prompt_ids")
    for place, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise SampleFault(
                f"token id {token} at place {place} is outside the vocabulary",
                field="prompt_ids",
                hint=f"ids of this model are 0 to {vocab_size - 1}; was another tokenizer used?",
            )


def parse_answer(status: int, body: bytes) -> Generated:
    """Read an answer of `/generate`, whatever its status.

    Raises:
        SampleFault: a 4xx that is about the prompt.
        UnusableAnswer: any other status, a body that is no answer, or a generation that was aborted.
    """
    if 400 <= status < 500 and status not in _NOT_THE_SAMPLES:
        raise SampleFault(f"the engine refused it with {status}: {_message(body)}")
    if status != 200:
        raise UnusableAnswer(f"the engine answered {status}: {_message(body)}")
    try:
        answer = _Answer.model_validate_json(body)
    except ValidationError as exc:
        fault = exc.errors()[0]
        key = ".".join(str(part) for part in fault["loc"])
        raise UnusableAnswer(f"no answer of /generate: {fault['msg']}", field=key or None) from exc
    meta = answer.meta_info
    if meta.finish_reason.type not in ("stop", "length"):
        raise UnusableAnswer(f"the generation ended as {meta.finish_reason.type}: {meta.finish_reason.message}")
    if strangers := {span.version for span in meta.weight_versions or ()} - {meta.weight_version}:
        raise UnusableAnswer(f"more than one weight_version made it: {meta.weight_version}, {', '.join(strangers)}")
    return Generated(
        output=answer.text,
        finish_reason=meta.finish_reason.type,
        prompt_tokens=meta.prompt_tokens,
        output_tokens=meta.completion_tokens,
        weight_version=meta.weight_version,
        logprob=_sum(meta.output_token_logprobs),
    )


# --- log-likelihoods


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Of one choice after a prompt: the sum of its tokens' log-probs."""

    logprob: float
    tokens: int


def split_choice(text: str, choice: str) -> tuple[str, str]:
    """The context, and all of it with the choice. White space before it is the choice's, as tokens have it."""
    return text.rstrip() or text, text + choice


def likelihood_request(text: str, context_tokens: int | None) -> dict[str, Any]:
    """The JSON body that asks for the log-probs of what follows the context; None: for the context's length alone."""
    request: dict[str, Any] = {"text": text, "sampling_params": {"temperature": 0.0, "max_new_tokens": 1}}
    if context_tokens is not None:
        request |= {"return_logprob": True, "logprob_start_len": max(0, context_tokens - 1)}
    return request


def parse_likelihood(body: bytes, answer: Generated, context_tokens: int) -> Likelihood:
    """What an answer, which `parse_answer` took, says of the tokens behind the context.

    Raises:
        SampleFault: the choice adds no token.
        UnusableAnswer: the log-probs are not all there.
    """
    count = answer.prompt_tokens - context_tokens
    if count < 1:
        raise SampleFault("a choice adds no token to its prompt", field="choices")
    told = _Answer.model_validate_json(body).meta_info.input_token_logprobs or ()
    values = [row[0] if row else None for row in told[-count:]]
    if len(values) < count or not all(isinstance(value, int | float) for value in values):
        raise UnusableAnswer(f"{len(told)} log-probs of the prompt came, and {count} were asked for")
    return Likelihood(math.fsum(float(value) for value in values if value is not None), count)


class _Foreign(BaseModel):
    """The parts of SGLang's answer that are read; the rest is its own affair."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _FinishReason(_Foreign):
    type: str
    message: str | None = None


class _Span(_Foreign):
    version: str


class _Meta(_Foreign):
    finish_reason: _FinishReason
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    weight_version: str
    weight_versions: tuple[_Span, ...] | None = None
    input_token_logprobs: tuple[tuple[Any, ...], ...] | None = None
    output_token_logprobs: tuple[tuple[Any, ...], ...] | None = None  # log-prob, token id, text


class _Answer(_Foreign):
    text: str
    meta_info: _Meta


def _sum(told: tuple[tuple[Any, ...], ...] | None) -> float | None:
    """Of the tokens' log-probs; NaN where one of them is no number, None where they were not asked for."""
    if told is None:
        return None
    values = [row[0] if row else None for row in told]
    return math.fsum(value if isinstance(value, int | float) else math.nan for value in values)


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return body[:500].decode(errors="replace")
