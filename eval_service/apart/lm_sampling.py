"""What a task's `generation_kwargs` ask of SGLang.

Invariant: an answer is drawn as lm-eval's `hf` backend draws it. What changes nothing is passed over, and what SGLang
can't do under the same meaning is refused with the task and the key, never left out unsaid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from lm_eval.defaults import DEFAULT_MAX_GEN_TOKS
from lm_eval.models.utils import normalize_gen_kwargs
from transformers import GenerationConfig

_MAX_STOPS = 32  # that SGLang takes
_HF_TOP_K = 50  # that transformers draws with, if neither task nor snapshot says otherwise
_DRAWN = ("top_p", "top_k", "min_p")
# `hf` knows the first alone; the others are passed as lm-eval's own SGLang and vLLM backends pass them.
_PASSED = ("min_new_tokens", "frequency_penalty", "presence_penalty", "ignore_eos", "stop_token_ids",
           "skip_special_tokens")  # fmt: skip
_ONLY_DRAWING = (*_DRAWN, "typical_p", "epsilon_cutoff", "eta_cutoff")  # nothing, where the likeliest token is taken
_NEVER = ("use_cache", "pad_token_id", "early_stopping", "length_penalty")  # the last two are of beams
_NOTHING: Mapping[str, Any] = {
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "n": 1, "best_of": 1, "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0, "min_length": 0, "diversity_penalty": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "penalty_alpha": 0.0,
}  # fmt: skip
_INSTEAD: Mapping[str, str] = {
    "repetition_penalty": "SGLang weighs the answer's tokens only, hf the prompt's too; leave it out, or write "
    "presence_penalty",
    "max_length": "write max_gen_toks, the most tokens of an answer",
    "num_beams": "the engines do not search beams; leave it out",
}


class CannotBeAsked(ValueError):
    """A task wants answers to be made in a way that SGLang has not."""


@dataclass(frozen=True, slots=True)
class Asking:
    """How an answer is made: SGLang's `sampling_params`, and every stop string, at which lm-eval's own rule cuts."""

    sampling: dict[str, Any]
    stop: list[str]


def drawn_by(snapshot: str) -> dict[str, Any]:
    """What `hf` draws with unless a task says otherwise: the snapshot's `generation_config.json`, then its own."""
    try:
        config = GenerationConfig.from_pretrained(snapshot)
    except OSError:
        config = GenerationConfig()
    found = {name: getattr(config, name, None) for name in _DRAWN}
    return {"top_k": _HF_TOP_K} | {name: value for name, value in found.items() if value is not None}


def asking(given: Mapping[str, Any], drawn: Mapping[str, Any], task: str | None) -> Asking:
    """Of a task's `generation_kwargs`; `drawn` is by `drawn_by`.

    Raises:
        CannotBeAsked: names the task and the key.
    """
    asked = dict(
        normalize_gen_kwargs({key: value for key, value in given.items() if value is not None}, DEFAULT_MAX_GEN_TOKS)
    )
    stop = [text for text in asked.pop("until") if text]
    drawing, temperature = bool(asked.pop("do_sample")), float(asked.pop("temperature", 0.0))
    sampling: dict[str, Any] = {"max_new_tokens": asked.pop("max_gen_toks"), "temperature": 0.0}
    if drawing:
        if temperature <= 0:
            _refuse(task, "do_sample", True, "give a temperature above 0, or write do_sample: false")
        sampling |= {"temperature": temperature, **drawn}
    for key, value in asked.items():
        if key in _PASSED or (drawing and key in _DRAWN):
            sampling[key] = value
        elif not _changes_nothing(key, value, drawing=drawing):
            _refuse(task, key, value, _INSTEAD.get(key, "the engines have nothing that means the same; leave it out"))
    if sampling.get("top_k") == 0:  # all, as hf has it
        sampling["top_k"] = -1
    return Asking({**sampling, "stop": stop[:_MAX_STOPS]}, stop)


def _changes_nothing(key: str, value: Any, *, drawing: bool) -> bool:
    return key in _NEVER or (key in _ONLY_DRAWING and not drawing) or (key in _NOTHING and value == _NOTHING[key])


def _refuse(task: str | None, key: str, value: object, fix: str) -> NoReturn:
    raise CannotBeAsked(f"task {task}: generation_kwargs.{key} = {value!r} can't be asked of the engines: {fix}")
