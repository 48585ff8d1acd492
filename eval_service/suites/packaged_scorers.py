"""Scorers that other people's libraries do; each is imported when it is first called, in a scorer's process."""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from typing import Any

from eval_service.suites.scorers import Unparsed, scorer


@scorer("math", metric="math_equal")
def math_equal(output: str, answer: str) -> float:
    """1 if the output's expression equals the answer's. Its own time limits are off: the pool has one."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"the answer holds no expression: {answer[:80]!r}")
    found = parse(output, parsing_timeout=None)
    if not found:
        raise Unparsed
    return float(verify(gold, found, timeout_seconds=None))


@scorer("json_schema", metric="valid")
def json_schema(output: str, answer: str, *, json_schema: dict[str, Any] | None = None) -> float:
    """1 if the output, a fence of Markdown around it apart, is JSON that fits the schema."""
    import jsonschema

    schema = json_schema if json_schema is not None else json.loads(answer)
    try:
        value = json.loads(_unfenced(output), parse_constant=_no_constant)
    except ValueError as exc:
        raise Unparsed from exc
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    return float(kind(schema).is_valid(value))


@scorer("rouge", metric="rougeL")
def rouge(output: str, answer: str, *, stem: bool = False) -> dict[str, float]:
    """F-measures."""
    found = _rouge(stem).score(answer, output)
    return {name: float(found[name].fmeasure) for name in ("rougeL", "rouge1", "rouge2")}


@scorer("chrf", metric="chrf")
def chrf(output: str, answer: str, *, word_order: int = 0) -> float:
    """Of one sentence, from 0 to 1."""
    return float(_chrf(word_order).sentence_score(output, [answer]).score) / 100.0


@lru_cache(maxsize=4)
def _rouge(stem: bool) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=stem)


@lru_cache(maxsize=8)
def _chrf(word_order: int) -> Any:
    from sacrebleu.metrics import CHRF

    return CHRF(word_order=word_order)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _unfenced(text: str) -> str:
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        return text[text.index("\n") : -3]
    return text
