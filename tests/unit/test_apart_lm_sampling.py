"""What lm-eval's tasks want of answers, as it is asked of SGLang, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval.models.utils")

from eval_service.apart.lm_sampling import CannotBeAsked, asking, drawn_by

GREEDY = {"max_new_tokens": 256, "temperature": 0.0, "stop": []}
DRAWN = {"top_k": 50}  # as transformers does, where nobody says otherwise


@pytest.mark.parametrize(
    ("given", "sampling"),
    [
        ({}, {}),
        ({"until": "\n", "max_gen_toks": 8, "do_sample": False}, {"max_new_tokens": 8, "stop": ["\n"]}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.2}, {}),
        ({"temperature": 0.7}, {"temperature": 0.7, "top_k": 50}),
        ({"temperature": 1, "top_k": 0, "top_p": 0.9, "min_p": 0.1},
         {"temperature": 1.0, "top_k": -1, "top_p": 0.9, "min_p": 0.1}),
        ({"frequency_penalty": 0.5, "presence_penalty": 0.25}, {"frequency_penalty": 0.5, "presence_penalty": 0.25}),
        ({"min_new_tokens": 4, "stop_token_ids": [7]}, {"min_new_tokens": 4, "stop_token_ids": [7]}),
        ({"num_beams": 1, "use_cache": True, "early_stopping": True, "repetition_penalty": 1.0, "n": 1}, {}),
        ({"temperature": None, "top_p": None, "num_beams": None}, {}),
    ],
)  # fmt: skip
def test_what_a_task_says_of_its_answers_is_asked_of_the_engine_and_what_changes_nothing_is_passed_over(
    given: dict[str, Any], sampling: dict[str, Any]
) -> None:
    assert asking(given, DRAWN, "t").sampling == {**GREEDY, **sampling}


@pytest.mark.parametrize(
    ("given", "key", "fix"),
    [
        ({"num_beams": 4}, "num_beams = 4", "do not search beams"),
        ({"repetition_penalty": 1.2}, "repetition_penalty = 1.2", "the prompt's too"),
        ({"max_length": 64}, "max_length = 64", "write max_gen_toks"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size = 3", "leave it out"),
        ({"temperature": 1.0, "typical_p": 0.2}, "typical_p = 0.2", "leave it out"),
        ({"do_sample": True}, "do_sample = True", "give a temperature above 0"),
        ({"of_tomorrow": "x"}, "of_tomorrow = 'x'", "leave it out"),
    ],
)
def test_what_the_engines_cannot_do_under_the_same_meaning_is_refused_by_task_and_key(
    given: dict[str, Any], key: str, fix: str
) -> None:
    with pytest.raises(CannotBeAsked, match=f"task mine: generation_kwargs.{key} can't be asked .*{fix}"):
        asking(given, DRAWN, "mine")


def test_more_stop_strings_than_sglang_takes_cut_the_answer_all_the_same() -> None:
    stops = [f"stop {number}" for number in range(40)]
    asked = asking({"until": stops}, DRAWN, "t")
    assert (asked.sampling["stop"], asked.stop) == (stops[:32], stops)


def test_a_snapshots_own_way_of_drawing_counts_where_a_task_has_none(tmp_path: Path) -> None:
    assert drawn_by(str(tmp_path)) == {"top_k": 50}
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 20, "top_p": 0.8, "do_sample": True}))
    assert drawn_by(str(tmp_path)) == {"top_k": 20, "top_p": 0.8}
    sampling = asking({"temperature": 0.7, "top_p": 0.9}, drawn_by(str(tmp_path)), "t").sampling
    assert (sampling["top_k"], sampling["top_p"], sampling["temperature"]) == (20, 0.9, 0.7)
    assert asking({}, drawn_by(str(tmp_path)), "t").sampling == GREEDY
