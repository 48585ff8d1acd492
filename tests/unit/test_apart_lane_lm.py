"""lm-eval's model over a lane: what it asks where a text is longer than the context, and what it tells of that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

lm_eval_instance = pytest.importorskip("lm_eval.api.instance")

from eval_service.apart.lane_lm import LaneLM, key_of  # noqa: E402 - lm-eval is an extra
from eval_service.apart.lm_eval_worker import cuts_of, samples_of  # noqa: E402
from tests.support.engine_model import CONTEXT, make_model  # noqa: E402

ROOM = 64 - 8  # of a context of 64, SGLang's own tokens apart


def answer(request: httpx.Request) -> httpx.Response:
    """As an engine does to which every token has a log-prob of -1."""
    body = json.loads(request.content)
    ids = body["input_ids"][body.get("logprob_start_len", 0) :]
    rows = [[None if number == 0 else -1.0, token, None] for number, token in enumerate(ids)]
    meta = {
        "finish_reason": {"type": "length"}, "weight_version": "v", "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": body["sampling_params"]["max_new_tokens"], "input_token_logprobs": rows,
        "input_top_logprobs": [[row] for row in rows],
    }  # fmt: skip
    return httpx.Response(200, json={"text": "said", "meta_info": meta})


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[LaneLM]:
    make_model(tmp_path / "model")
    model = LaneLM(str(tmp_path / "model"), "http://lane", "v", concurrency=2, context=64)
    model._http.close()
    model._http = httpx.Client(base_url="http://lane", transport=httpx.MockTransport(answer))
    yield model
    model._http.close()
    model._pool.shutdown()


def asked(kind: str, *arguments: Any) -> Any:
    return lm_eval_instance.Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def cut(lane: LaneLM, *arguments: Any) -> tuple[int, int]:
    """Tokens that were sent and lost, of a request."""
    told = lane.told[key_of(arguments)]
    return told.prompt_tokens, told.cut


def test_a_prompt_to_generate_from_keeps_what_fits_beside_the_answer_and_the_rest_is_told(lane: LaneLM) -> None:
    wish = {"until": [], "max_gen_toks": 16}
    texts = ["a" * (ROOM - 16), "b" * (ROOM - 15), "c" * 200]
    assert lane.generate_until([asked("generate_until", text, wish) for text in texts]) == ["said"] * 3
    assert [cut(lane, text, wish) for text in texts] == [(40, 0), (40, 1), (40, 160)]
    assert cuts_of(lane.told) == {"cut": 2, "prompts": 3, "most": 160}


def test_choices_behind_a_long_prompt_are_weighed_whole_and_the_prompt_is_told_once_with_the_most_that_it_lost(
    lane: LaneLM,
) -> None:
    pairs = [("a" * ROOM, "x"), ("b" * ROOM, "xy"), ("b" * ROOM, "xyz")]
    values = lane.loglikelihood([asked("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    assert [value for value, _ in values] == [-1.0, -2.0, -3.0]
    assert [cut(lane, *pair) for pair in pairs] == [(57, 0), (57, 1), (57, 2)]
    assert cuts_of(lane.told) == {"cut": 1, "prompts": 2, "most": 2}


def test_a_whole_text_is_weighed_in_windows_every_token_of_it_once_and_none_is_told_as_cut(lane: LaneLM) -> None:
    for length in (1, ROOM, ROOM + 1, 3 * ROOM + 5):
        [value] = lane.loglikelihood_rolling([asked("loglikelihood_rolling", "a" * length)])
        assert value == -float(length)
    assert cuts_of(lane.told) == {"cut": 0, "prompts": 0, "most": 0}


def test_what_leaves_no_room_for_a_prompt_is_refused_by_its_name_and_not_asked(lane: LaneLM) -> None:
    with pytest.raises(ValueError, match="max_gen_toks is 56, and prompt and answer have 56 tokens together"):
        lane.generate_until([asked("generate_until", "a", {"until": [], "max_gen_toks": ROOM})])
    with pytest.raises(ValueError, match="a continuation has 57 tokens, not 1 to 56"):
        lane.loglikelihood([asked("loglikelihood", "a", "x" * (ROOM + 1))], disable_tqdm=True)
    assert lane.told == {}


@pytest.mark.parametrize(("engines", "heeded"), [(None, CONTEXT), (64, 64), (10**6, CONTEXT)])
def test_the_context_is_the_lesser_of_the_engines_and_the_models(
    tmp_path: Path, engines: int | None, heeded: int
) -> None:
    make_model(tmp_path / "model")
    model = LaneLM(str(tmp_path / "model"), "http://lane", "v", concurrency=1, context=engines)
    model._http.close()
    assert (model.context, model.max_length) == (heeded, heeded - 8)


def test_a_sample_has_the_most_tokens_that_any_of_its_choices_prompts_lost_and_others_nothing(lane: LaneLM) -> None:
    pairs = [("b" * ROOM, "xy"), ("b" * ROOM, "xyz"), ("a", "x")]
    lane.loglikelihood([asked("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    long = {"arguments": pairs[:2], "filtered_resps": [(-2.0, True), (-3.0, True)], "target": 0, "acc": 1.0}
    short = {"arguments": pairs[2:], "filtered_resps": [(-1.0, True)], "target": 0, "acc": 1.0}
    found = {"samples": {"task": [long, short]}}
    told = [sample.more for sample in samples_of(found, lane.told, {"metric": "task/acc", "weight_version": "v"})]
    assert told == [{"prompt_cut": 2.0}, {}]
