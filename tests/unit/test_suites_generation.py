"""What is sent to an engine and what is made of its answer."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from eval_service.suites.config import SamplingConfig
from eval_service.suites.datasets import Prompt
from eval_service.suites.generation import Generated, SampleFault, UnusableAnswer, parse_answer, request_for

SAMPLING = SamplingConfig(max_new_tokens=16)


def _ids(*ids: int) -> Prompt:
    return Prompt(0, "d", "", "a", ids)


def test_text_goes_as_text_with_every_sampling_parameter() -> None:
    sampling = SamplingConfig(temperature=0.5, top_p=0.9, top_k=4, max_new_tokens=7, stop=("\n",))
    assert request_for(Prompt(0, "d", "2+2=", "4"), sampling) == {
        "text": "2+2=",
        "sampling_params": {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "max_new_tokens": 7, "stop": ["\n"]},
    }
    assert "stop" not in request_for(Prompt(0, "d", "2+2=", "4"), SAMPLING)["sampling_params"]


def test_ids_within_the_vocabulary_go_as_ids() -> None:
    assert request_for(_ids(0, 511), SAMPLING, vocab_size=512)["input_ids"] == [0, 511]


@pytest.mark.parametrize("bad", [512, -1, 10**9])
def test_an_id_beyond_the_vocabulary_never_leaves(bad: int) -> None:
    with pytest.raises(SampleFault, match=rf"prompt_ids: token id {bad} at place 1 .*0 to 511"):
        request_for(_ids(3, bad), SAMPLING, vocab_size=512)


def test_ids_are_not_sent_while_the_vocabulary_is_unknown() -> None:
    with pytest.raises(SampleFault, match="size is not known"):
        request_for(_ids(3), SAMPLING)


def _body(finish: dict[str, Any], **meta: Any) -> bytes:
    counts = {"id": "x", "prompt_tokens": 5, "completion_tokens": 2, "weight_version": "abc.1", "cached_tokens": 0}
    return json.dumps(
        {"text": "4", "output_ids": [4], "meta_info": {**counts, "finish_reason": finish, **meta}}
    ).encode()


@pytest.mark.parametrize(
    "finish", [{"type": "stop", "matched": 2}, {"type": "stop", "matched": "\n"}, {"type": "length", "length": 2}]
)
def test_an_answer_is_read(finish: dict[str, Any]) -> None:
    assert parse_answer(200, _body(finish)) == Generated("4", finish["type"], 5, 2, "abc.1")


def test_an_aborted_generation_is_no_answer() -> None:
    with pytest.raises(UnusableAnswer, match="ended as abort: for a reload"):
        parse_answer(200, _body({"type": "abort", "message": "for a reload"}))


def test_a_generation_that_weights_were_swapped_under_is_no_answer() -> None:
    same = {"version": "abc.1", "start": 0, "end": 2}
    assert parse_answer(200, _body({"type": "stop"}, weight_versions=[same])).weight_version == "abc.1"
    with pytest.raises(UnusableAnswer, match=r"abc\.1, abc\.2"):
        parse_answer(200, _body({"type": "stop"}, weight_versions=[same, {**same, "version": "abc.2"}]))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"text": "a"}',
        b"\xff",
        _body({"type": "stop"}, weight_version=None),
        _body({"type": "stop"})[:-1],
    ],
)
def test_a_200_that_is_no_answer_is_run_again(body: bytes) -> None:
    with pytest.raises(UnusableAnswer):
        parse_answer(200, body)


def test_a_400_is_the_samples_own_with_the_engines_words() -> None:
    with pytest.raises(SampleFault, match="400: too long"):
        parse_answer(400, b'{"error": {"message": "too long"}}')
    with pytest.raises(SampleFault, match="422: plain words"):
        parse_answer(422, b"plain words")


@pytest.mark.parametrize("status", [401, 403, 404, 429, 302, 503])
def test_a_wrong_key_a_wrong_route_and_no_room_are_not_the_samples(status: int) -> None:
    with pytest.raises(UnusableAnswer, match=str(status)):
        parse_answer(status, b"")


def test_a_samples_own_seed_goes_with_it_and_greedy_ones_have_none() -> None:
    prompt = Prompt(0, "d", "2+2=", "4")
    assert request_for(prompt, SAMPLING, seed=7)["sampling_params"]["sampling_seed"] == 7
    assert "sampling_seed" not in request_for(prompt, SAMPLING)["sampling_params"]


def test_log_probs_are_asked_for_where_the_suite_wants_them_and_summed() -> None:
    prompt = Prompt(0, "d", "2+2=", "4")
    assert "return_logprob" not in request_for(prompt, SAMPLING)
    assert request_for(prompt, SamplingConfig(logprob=True))["return_logprob"] is True
    told = parse_answer(200, _body({"type": "stop"}, output_token_logprobs=[[-0.25, 4, None], [-0.5, 5, "x"]]))
    assert told.logprob == -0.75
    assert parse_answer(200, _body({"type": "stop"})).logprob is None


def test_a_log_prob_that_is_no_number_is_told_as_one() -> None:
    told = parse_answer(200, _body({"type": "stop"}, output_token_logprobs=[[-0.25, 4, None], [None, 5, None]]))
    assert told.logprob is not None
    assert math.isnan(told.logprob)
