"""The scorers: what they extract and what they say, for any output that a model may give."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval_service.suites.choosing import choice_note, choice_score
from eval_service.suites.code_scorer import program_in
from eval_service.suites.datasets import Prompt
from eval_service.suites.generation import split_choice
from eval_service.suites.scorer_config import SCORER_CONFIGS, Judge
from eval_service.suites.scorers import SCORERS, Unparsed, extract, load_all, number_in

load_all()
UNPARSED = "unparsed"


def said(name: str, output: str, answer: str, **options: Any) -> float | str | dict[str, float]:
    """What a scorer says."""
    try:
        found: float | dict[str, float] = SCORERS[name].function(output, answer, **options)
    except Unparsed:
        return UNPARSED
    return found


@pytest.mark.parametrize(
    ("name", "output", "answer", "options", "expected"),
    [
        ("exact", "ABC ", "abc", {"ignore_case": True}, 1.0),
        ("contains", "It is PARIS.", "Paris", {"ignore_case": True}, 1.0),
        ("contains", "It is PARIS.", "Paris", {}, 0.0),
        ("regex", "answer is A, no: answer is B", "B", {"pattern": r"answer is (\w)"}, 1.0),
        ("regex", "answer is A, no: answer is B", "A", {"pattern": r"answer is (\w)", "take": "first"}, 1.0),
        ("regex", "who knows", "B", {"pattern": r"answer is (\w)"}, UNPARSED),
        ("regex", "(B)", "B", {"pattern": "[A-D]"}, 1.0),
        ("numeric", "so 3 + 4 = 7.", "#### 7", {}, 1.0),
        ("numeric", "#### 8\nor 9", "8", {}, 1.0),
        ("numeric", "it costs $1,234.50", "1234.5", {}, 1.0),
        ("numeric", "5-3", "3", {}, 1.0),
        ("numeric", "it is -3", "-3", {}, 1.0),
        ("numeric", "none", "3", {}, UNPARSED),
        ("numeric", "3.1415", "3.14159", {"tolerance": 0.001}, 1.0),
        ("math", r"The answer is $\frac{1}{2}$", "$0.5$", {}, 1.0),
        ("math", r"The answer is $\boxed{x^2 + 2x + 1}$", "$(x+1)^2$", {}, 1.0),
        ("math", "no idea at all", "$3$", {}, UNPARSED),
        ("json_schema", '```json\n{"a": 1}\n```', "", {"json_schema": {"required": ["a"]}}, 1.0),
        ("json_schema", '{"b": 1}', '{"required": ["a"]}', {}, 0.0),
        ("json_schema", '{"a": NaN}', "", {"json_schema": {}}, UNPARSED),
        ("rouge", "the cat sat", "the cat sat", {}, {"rougeL": 1.0, "rouge1": 1.0, "rouge2": 1.0}),
        ("chrf", "guten morgen", "guten morgen", {}, 1.0),
        ("chrf", "xyz", "guten morgen", {}, 0.0),
        ("judge", "Well. Yes", "", {"verdict": r"\b(yes|no)\b", "scores": {"yes": 1.0, "no": 0.0}, "scale": 1.0}, 1.0),
        ("judge", "Score: 4", "", {"verdict": r"Score: (\d+)", "scores": {}, "scale": 5.0}, 0.8),
        ("code", "```python\ndef f():\n    return 3\n```", "assert f() == 3", {}, 1.0),
        ("code", "def f():\n    return 4", "assert f() == 3", {}, 0.0),
        ("code", "import sys\nsys.exit(0)", "assert False", {}, 0.0),
        ("code", "import os\nos._exit(0)", "assert False", {}, 0.0),
        ("code", "while True: pass", "", {"run_timeout_s": 0.5}, 0.0),
        ("code", "x = bytearray(10**9)", "", {"memory_mb": 128}, 0.0),
        ("code", "open('f', 'w').write('x' * (1 << 25))", "", {}, 0.0),
        ("code", "import os\nassert 'HOME' in os.environ and len(os.environ) < 8", "", {}, 1.0),
    ],
)
def test_what_each_scorer_says(name: str, output: str, answer: str, options: dict[str, Any], expected: Any) -> None:
    assert said(name, output, answer, **options) == pytest.approx(expected) if expected != UNPARSED else True
    if expected == UNPARSED:
        assert said(name, output, answer, **options) == UNPARSED


def test_a_program_reaches_no_network_where_the_kernel_allows_it_none() -> None:
    code = "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)"
    assert said("code", code, "") == 0.0


@pytest.mark.parametrize("text", ["perhaps", "Score: 9"])
def test_a_verdict_that_can_not_be_read_is_an_error_and_no_opinion(text: str) -> None:
    with pytest.raises(ValueError, match="verdict"):
        said("judge", text, "", verdict=r"Score: (\d+)", scores={}, scale=5.0)


def test_an_answer_that_holds_nothing_to_compare_with_is_an_error() -> None:
    with pytest.raises(ValueError, match="the answer holds no"):
        said("numeric", "3", "none at all")


_NUMBERS = st.decimals(min_value=-(10**12), max_value=10**12, places=3, allow_nan=False, allow_infinity=False)


@given(_NUMBERS, st.text(alphabet="abc \n:=$", max_size=20), st.text(alphabet="abc \n!", max_size=20))
def test_the_last_number_is_found_as_it_was_written(value: Decimal, before: str, after: str) -> None:
    for written in (f"{value}", f"{value:,}"):
        assert number_in(f"{before} {written} {after}") == value
        assert number_in(f"1 2 {before} #### {written} {after} 77") == value


@given(st.text())
def test_no_text_breaks_an_extractor(text: str) -> None:
    found = number_in(text)
    assert found is None or found.is_finite()
    assert isinstance(program_in(text), str)
    for name, options in (("regex", {"pattern": r"(\d)|x"}), ("numeric", {}), ("exact", {}), ("contains", {})):
        assert said(name, text, "3", **options) in (0.0, 1.0, UNPARSED)
    assert said("json_schema", text, "", json_schema={}) in (1.0, UNPARSED)


@given(st.text(alphabet=st.characters(exclude_characters="()", codec="utf-8"), min_size=1), st.text())
def test_what_a_pattern_is_built_around_is_what_it_extracts(answer: str, before: str) -> None:
    assert extract(f"{before}<{answer}>", "<(" + re.escape(answer) + ")>") == answer


@given(st.text(), st.text(), st.text())
def test_a_judges_prompt_holds_what_it_judges_as_it_stands(prompt: str, output: str, answer: str) -> None:
    judge = Judge(name="judge", group="g", template="{prompt}|{output}|{answer}|{other}", verdict="x")
    assert judge.asked(prompt=prompt, output=output, answer=answer) == f"{prompt}|{output}|{answer}|{{other}}"


@given(st.text(max_size=20), st.text(min_size=1, max_size=5))
def test_a_choice_begins_where_its_context_ends(text: str, choice: str) -> None:
    context, whole = split_choice(text, choice)
    assert whole == text + choice
    assert whole.startswith(context)
    assert not context.strip() or context == context.rstrip()


def test_a_choice_is_judged_by_its_log_likelihood_and_beside_it_by_that_a_byte() -> None:
    prompt = Prompt(0, "d", "q", "a long one", choices=("no", "a long one"))
    score = choice_score(prompt, (-3.0, -5.0))
    assert (score.value, dict(score.more)) == (0.0, {"acc_norm": 1.0})
    assert choice_note(prompt, (-3.0, -5.0)) == '{"no": -3.0, "a long one": -5.0}'
    assert choice_score(prompt, (math.nan, -5.0)).error is not None


def test_every_scorer_that_a_suite_may_name_has_a_function() -> None:
    without = {"function", "multiple_choice"}  # the user's, and the one that is no text's
    assert set(SCORER_CONFIGS) - without <= set(SCORERS)
