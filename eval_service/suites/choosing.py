"""Multiple choice: what the choices' log-likelihoods amount to. No text was generated, so nothing is to be parsed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from eval_service.suites.datasets import Prompt
from eval_service.suites.scoring import Score


def likeliest(choices: Sequence[str], logprobs: Sequence[float]) -> str:
    """The choice with the highest log-likelihood, the first of equals."""
    return choices[max(range(len(choices)), key=lambda i: logprobs[i])]


def choice_score(prompt: Prompt, logprobs: Sequence[float]) -> Score:
    """`acc` by log-likelihood; `acc_norm` by log-likelihood a byte, so that a long choice is not at a loss."""
    if not all(math.isfinite(value) for value in logprobs):
        return Score(None, "a choice's log-likelihood is no finite number")
    normed = [value / len(text.encode()) for value, text in zip(logprobs, prompt.choices, strict=True)]
    right = float(likeliest(prompt.choices, logprobs) == prompt.answer)
    return Score(right, more={"acc_norm": float(likeliest(prompt.choices, normed) == prompt.answer)})


def choice_note(prompt: Prompt, logprobs: Sequence[float]) -> str:
    """The choices with their log-likelihoods, as JSON."""
    return json.dumps(dict(zip(prompt.choices, logprobs, strict=True)), ensure_ascii=False)
