"""A suite of each kind, the examples', over one snapshot on the real engines."""

from __future__ import annotations

import json
import math
import uuid
from pathlib import Path

import pytest

from eval_service.contract.states import PointState
from eval_service.contract.wire import DispatchRequest, EngineState, EngineView, PointView, RunSpec, SampleView, Source
from eval_service.suites.suite import Suite, load_suites
from tests.support.live import EXAMPLES, SUITE, Live, wait_for

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]


def judges(live: Live) -> list[EngineView]:
    """The engines of the frozen group."""
    return [engine for group in live.client.fleet().groups if group.name == "judge" for engine in group.engines]


@pytest.fixture(scope="module")
def points(live: Live) -> dict[str, PointView]:
    """The points of all example suites on the base model, by suite."""
    suites = tuple(load_suites(EXAMPLES / "suites.toml"))
    live.client.scale("judge", 1)
    try:
        spec = RunSpec(root=str(live.root), suites=suites)
        live.client.put_run("every-kind", spec)
        request = DispatchRequest(
            run="every-kind",
            step=0,
            suites=suites,
            reservation=str(uuid.uuid4()),
            snapshot=str(live.model),
            source=Source.CALLER,
        )
        live.client.dispatch(request)
        return {point.suite: point for point in live.ended("every-kind", len(suites), 240.0)}
    finally:
        live.client.scale("judge", 0)
        wait_for(lambda: all(engine.state is EngineState.LOST for engine in judges(live)), "the judge to leave")


def test_a_suite_of_each_kind_is_done_on_the_real_engines(live: Live, points: dict[str, PointView]) -> None:
    told = {name: (point.state, point.reason, point.detail) for name, point in points.items()}
    assert {name for name, point in points.items() if point.state is not PointState.DONE} == set(), told
    for name, suite in load_suites(EXAMPLES / "suites.toml").items():
        assert isinstance(suite, Suite)
        samples = live.samples(points[name].id)
        assert len(samples) == suite.size
        assert [sample.error for sample in samples] == [None] * suite.size, name
        metrics = live.client.point(points[name].id).metrics or {}
        assert set(suite.config.metrics) <= set(metrics)
    _check_chat(live.samples(points["chat"].id))
    _check_choices(live.samples(points["choice"].id), live.model)
    assert {sample.note is not None for sample in live.samples(points["judged"].id)} == {True}


def test_the_same_snapshot_evaluated_twice_in_float32_gives_the_same_samples(live: Live) -> None:
    live.wait_engines()
    live.client.put_run("twice", RunSpec(root=str(live.root), suites=(SUITE,)))
    for step in (1, 2):
        request = DispatchRequest(
            run="twice", step=step, reservation=str(uuid.uuid4()), snapshot=str(live.model), source=Source.CALLER
        )
        live.client.dispatch(request)
    one, other = live.ended("twice", 2)
    assert (one.state, other.state) == (PointState.DONE, PointState.DONE)
    assert one.weight_version != other.weight_version
    assert (one.metrics, one.score) == (other.metrics, other.score)
    outputs, again = ([sample.output for sample in live.samples(point.id)] for point in (one, other))
    assert outputs == again


def _check_chat(samples: list[SampleView]) -> None:
    """The snapshot's own template, around a solved example and the question."""
    for sample in samples:
        assert sample.prompt.startswith("<|im_start|>user\n")
        assert sample.prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert sample.prompt.count("<|im_start|>user\n") == 2


def _check_choices(samples: list[SampleView], model: Path) -> None:
    """The log-likelihoods are those of the same model in transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for sample in samples:
        context = tokenizer.encode(sample.prompt)
        for choice, told in json.loads(sample.note or "").items():
            ids = torch.tensor([tokenizer.encode(sample.prompt + choice)])
            with torch.no_grad():
                logprobs = torch.log_softmax(net(ids).logits[0, :-1].float(), dim=-1)
            own = logprobs.gather(1, ids[0, 1:, None])[len(context) - 1 :].sum().item()
            assert math.isclose(own, told, abs_tol=1e-3), (choice, own, told)
