"""lm-eval's model over a lane: what it asks where a text is longer than the context, and what it tells of that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

lm_eval_instance = pytest.importorskip("lm_eval.api.instance")

from eval_service.apart.lane_lm import LaneLM, key_of  # noqa: E402 - lm-eval is an extra
from eval_service.apart.lm_eval_worker import check_template, cuts_of, main, samples_of  # noqa: E402
from eval_service.contract.states import PointState, Reason  # noqa: E402
from eval_service.controller.outcomes import LaneEnd  # noqa: E402
from eval_service.controller.proxied import ProxiedLane  # noqa: E402
from eval_service.suites.chat import NoTemplate  # noqa: E402
from tests.support.engine_model import CONTEXT, VOCAB_SIZE, make_model  # noqa: E402

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
        told = lane.told[key_of(("a" * length,))]
        sent = length + 1 if length <= ROOM else -(-length // ROOM) * (ROOM + 1)  # the last window is filled up
        assert (told.prompt_tokens, told.output_tokens, told.finish_reason) == (sent, 0, None)
    assert cuts_of(lane.told) == {"cut": 0, "prompts": 0, "most": 0}


def test_what_leaves_no_room_for_a_prompt_is_refused_by_its_name_and_not_asked(lane: LaneLM) -> None:
    with pytest.raises(ValueError, match="max_gen_toks is 56, and prompt and answer have 56 tokens together"):
        lane.generate_until([asked("generate_until", "a", {"until": [], "max_gen_toks": ROOM})])
    with pytest.raises(ValueError, match="a continuation has 57 tokens, not 1 to 56"):
        lane.loglikelihood([asked("loglikelihood", "a", "x" * (ROOM + 1))], disable_tqdm=True)
    assert lane.told == {}


def test_what_a_task_wants_that_the_engines_have_not_is_refused_by_its_name_before_anything_is_asked(
    lane: LaneLM,
) -> None:
    whole = [asked("generate_until", "a", {"until": []}), asked("generate_until", "b", {"num_beams": 4})]
    for request in whole:
        request.task_name = "mine"
    with pytest.raises(ValueError, match=r"task mine: generation_kwargs\.num_beams = 4"):
        lane.generate_until(whole)
    assert lane.told == {}


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and m.content == 'no' %}{{ raise_exception('no') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def turns(*contents: str) -> list[dict[str, str]]:
    return [
        {"role": role, "content": text} for role, text in zip(("system", "user", "assistant"), contents, strict=False)
    ]


def test_a_chat_is_rendered_with_the_snapshots_template_and_goes_on_where_the_hf_backends_does(lane: LaneLM) -> None:
    lane.tokenizer.chat_template = TEMPLATE
    assert lane.apply_chat_template(turns("be", "q")) == "<system>be<user>q<assistant>"
    begun = lane.apply_chat_template(turns("be", "q", "so"), add_generation_prompt=False)
    assert begun == "<system>be<user>q<assistant>so"
    assert lane.apply_chat_template(turns("no", "q")) == "<user>q<assistant>", "a template may refuse a system message"
    assert lane.chat_template(True) == TEMPLATE
    assert "/" not in lane.tokenizer_name


def test_a_snapshot_without_a_chat_template_is_refused_by_the_suites_key_with_the_fix(lane: LaneLM) -> None:
    assert not lane.tokenizer.chat_template
    for wanted in (True, "tool_use"):
        with pytest.raises(NoTemplate, match=r"^suites\.mine\.apply_chat_template: .* no chat template .* or set "):
            check_template(lane, {"suite": "mine", "options": {"apply_chat_template": wanted}})
    check_template(lane, {"suite": "mine", "options": {"apply_chat_template": False}})
    lane.tokenizer.chat_template = TEMPLATE
    check_template(lane, {"suite": "mine", "options": {"apply_chat_template": True}})


class Between:
    """The worker's parent, and the lane's process: what the one is told, the other answers."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self.last: dict[str, Any] = {}

    def asked(self) -> dict[str, Any]:
        return self._order

    def tell(self, **message: Any) -> None:
        self.last = message

    async def answer(self) -> dict[str, Any]:
        return self.last


def test_a_point_that_asks_chats_of_a_snapshot_without_a_template_is_skipped_and_says_why(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    order = {"snapshot": str(tmp_path / "model"), "url": "http://lane", "weight_version": "v", "concurrency": 1,
             "key": None, "context": None, "suite": "mine", "options": {"apply_chat_template": True}}  # fmt: skip
    told: Any = Between(order)
    main(told)
    with pytest.raises(LaneEnd) as end:
        asyncio.run(ProxiedLane._told(cast("Any", None), told))
    assert (end.value.state, end.value.reason) == (PointState.SKIPPED, Reason.SNAPSHOT_INVALID)
    assert "suites.mine.apply_chat_template: the snapshot has no chat template" in str(end.value.detail)


@pytest.mark.parametrize(("engines", "heeded"), [(None, CONTEXT), (64, 64), (10**6, CONTEXT)])
def test_the_context_is_the_lesser_of_the_engines_and_the_models(
    tmp_path: Path, engines: int | None, heeded: int
) -> None:
    make_model(tmp_path / "model")
    model = LaneLM(str(tmp_path / "model"), "http://lane", "v", concurrency=1, context=engines)
    model._http.close()
    assert (model.context, model.max_length) == (heeded, heeded - 8)


def test_a_model_whose_text_config_is_nested_has_its_texts_length_and_vocabulary(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    text = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 96}
    file.write_text(json.dumps({"model_type": "mistral3", "text_config": {"model_type": "mistral", **text}}))
    model = LaneLM(str(tmp_path / "model"), "http://lane", "v", concurrency=1)
    model._http.close()
    assert (model.context, model._vocab_size) == (96, VOCAB_SIZE)


def test_a_sample_has_the_most_tokens_that_any_of_its_choices_prompts_lost_and_others_nothing(lane: LaneLM) -> None:
    pairs = [("b" * ROOM, "xy"), ("b" * ROOM, "xyz"), ("a", "x")]
    lane.loglikelihood([asked("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    long = {"arguments": pairs[:2], "filtered_resps": [(-2.0, True), (-3.0, True)], "target": 0, "acc": 1.0}
    short = {"arguments": pairs[2:], "filtered_resps": [(-1.0, True)], "target": 0, "acc": 1.0}
    found = {"samples": {"task": [long, short]}}
    told = [sample.more for sample in samples_of(found, lane.told, {"metric": "task/acc", "weight_version": "v"})]
    assert told == [{"prompt_cut": 2.0}, {}]
