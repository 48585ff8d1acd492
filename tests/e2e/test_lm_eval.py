"""lm-eval's tasks through the lanes of the real service, against lm-eval's own `hf` backend on the same snapshot."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from eval_service.contract.results import AlarmKind
from eval_service.contract.states import PointState
from eval_service.contract.wire import DispatchRequest, Kind, PointView, RunSpec, Source
from tests.support.live import DONE, Live, wait_for
from tests.support.processes import assert_gone, tree

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

RUN, CHAT_RUN = "harness", "instruct"
DOCUMENTS = 12
TASKS = ["tiny_generate", "tiny_choose", "long_generate", "long_choose", "long_rolling"]
CHAT = {"num_fewshot": 2, "apply_chat_template": True, "system_instruction": "sort"}
CONTEXT = 256  # of the tiny model
_HF = """
import json, sys
from eval_service.apart.lm_eval_worker import evaluate
from lm_eval.models.huggingface import HFLM
asked = json.loads(sys.argv[1])
model = HFLM(
    pretrained=asked["snapshot"], dtype="float32", device="cpu", batch_size=1, max_length=asked["max_length"]
)
found = [evaluate(model, {**asked, **suite}) for suite in asked["suites"]]
told = [{"results": each["results"], "samples": each["samples"]} for each in found]
print("\\n" + json.dumps(told, default=str))
"""


def by_hf(live: Live) -> list[dict[str, Any]]:
    """What the `hf` backend makes of the tasks, with the length that docs/lm_eval.md tells of and its own defaults."""
    asked = {
        "snapshot": str(live.model), "path": str(live.base / "lm_tasks"), "max_length": CONTEXT - 8,
        "suites": [{"tasks": TASKS, "options": {}}, {"tasks": TASKS[:2], "options": CHAT}],
    }  # fmt: skip
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", _HF, json.dumps(asked)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@dataclass(frozen=True, slots=True)
class Harness:
    """A point whose first worker was killed as it began, one that asks chat messages, and what the `hf` backend makes
    of the same tasks."""

    point: PointView
    expected: dict[str, Any]
    killed: list[psutil.Process]
    chat: PointView
    chat_expected: dict[str, Any]


@pytest.fixture(scope="module")
def harness(live: Live) -> Harness:
    live.wait_engines()
    asked = dispatched(live, RUN, "harness")
    wait_for(lambda: live.client.point(asked).state is PointState.RUNNING, "the point to run")
    killed = wait_for(lambda: workers(live), "its process")
    killed[0].kill()
    dispatched(live, CHAT_RUN, "instruct")
    expected, chat_expected = by_hf(live)
    [point], [chat] = live.ended(RUN, 1, timeout_s=200), live.ended(CHAT_RUN, 1, timeout_s=200)
    return Harness(point, expected, killed, chat, chat_expected)


def dispatched(live: Live, run: str, suite: str) -> str:
    """A new run's one point, by its id."""
    live.client.put_run(run, RunSpec(root=str(live.root), suites=(suite,), max_in_flight=10))
    request = DispatchRequest(
        run=run, step=0, suites=(suite,), kind=Kind.MANUAL, source=Source.CALLER, snapshot=str(live.model),
        reservation=str(uuid.uuid4()),
    )  # fmt: skip
    return live.client.dispatch(request).points[0].id


def workers(live: Live) -> list[psutil.Process]:
    """The processes that lm-eval runs in, and what they have started."""
    found = []
    for process in psutil.Process(live.child.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "eval_service.apart.lm_eval_worker" in process.cmdline():
                found += tree(process.pid)
    return found


def test_kill_9_of_lm_evals_process_is_its_attempts_fault_and_the_next_one_is_done_and_leaves_nothing(
    live: Live, harness: Harness
) -> None:
    point = live.client.point(harness.point.id)
    first, second = point.history
    assert (first.outcome, second.outcome) == ("lm_eval", "done")
    assert "killed by signal 9" in (first.detail or "")
    assert_gone(harness.killed)
    assert workers(live) == []
    assert sorted((live.root / RUN / "evals").iterdir()) == [Path(point.samples_path or "")]


def test_tasks_of_lm_eval_through_a_lane_have_the_accuracy_and_log_likelihoods_of_its_own_hf_backend(
    live: Live, harness: Harness
) -> None:
    point, expected = harness.point, harness.expected
    assert point.state is DONE, (point.reason, point.detail)
    for task, metric in (("tiny_choose", "acc"), ("tiny_generate", "exact_match")):
        told = point.metrics[f"{task}/{metric}"]
        assert told.value == pytest.approx(expected["results"][task][f"{metric},none"])
        assert told.n == DOCUMENTS
        assert told.stderr == pytest.approx(expected["results"][task][f"{metric}_stderr,none"])
    assert point.score == point.metrics["tiny_choose/acc"].value
    samples = live.samples(point.id)
    chosen = [sample for sample in samples if sample.dataset == "tiny_choose"]
    likely = [max(float(reply[0]) for reply in row["filtered_resps"]) for row in expected["samples"]["tiny_choose"]]
    assert [sample.logprob for sample in chosen] == pytest.approx(likely, abs=1e-3)
    for sample, row in zip(chosen, expected["samples"]["tiny_choose"], strict=True):
        own = {given[1]: float(reply[0]) for given, reply in zip(row["arguments"], row["filtered_resps"], strict=True)}
        assert json.loads(sample.note or "") == pytest.approx(own, abs=1e-3), "of every choice, not only of the best"
    made = [sample.output for sample in samples if sample.dataset == "tiny_generate"]
    assert made == [row["filtered_resps"][0] for row in expected["samples"]["tiny_generate"]]
    assert {sample.weight_version for sample in samples} == {point.weight_version}
    assert all(sample.engine.startswith("eval-") and sample.prompt_tokens for sample in samples)


def test_chats_with_few_shot_turns_and_a_system_message_are_those_of_the_hf_backend_and_so_are_their_answers(
    live: Live, harness: Harness
) -> None:
    point, expected = harness.chat, harness.chat_expected
    assert point.state is DONE, (point.reason, point.detail)
    for task, metric in (("tiny_choose", "acc"), ("tiny_generate", "exact_match")):
        assert point.metrics[f"{task}/{metric}"].value == pytest.approx(expected["results"][task][f"{metric},none"])
    samples = live.samples(point.id)
    for task in TASKS[:2]:
        own = [sample for sample in samples if sample.dataset == task]
        rows = expected["samples"][task]
        assert [sample.prompt for sample in own] == [row["arguments"][0][0] for row in rows], "the same examples, drawn"
        assert all(sample.prompt.startswith("<|im_start|>system\nsort<|im_end|>") for sample in own)
        assert {sample.prompt.count("<|im_start|>assistant") for sample in own} == {3}
        if task == "tiny_generate":
            assert [sample.output for sample in own] == [row["filtered_resps"][0] for row in rows]
        else:
            likely = [max(float(reply[0]) for reply in row["filtered_resps"]) for row in rows]
            assert [sample.logprob for sample in own] == pytest.approx(likely, abs=1e-3)


def test_prompts_that_the_context_does_not_hold_lose_what_the_hf_backend_takes_from_them_and_point_and_samples_say_so(
    live: Live, harness: Harness
) -> None:
    point, expected = harness.point, harness.expected
    [alarm] = [alarm for alarm in point.alarms if alarm.kind is AlarmKind.PROMPT_CUT]
    # One of 300 tokens where 240 and an answer of 8 have room, one of 450 before choices of 2 and 3 where 249 have.
    assert alarm.evidence == {"cut": 2, "prompts": 2 * DOCUMENTS + 4, "most_tokens": 204, "context": CONTEXT}
    assert alarm.message.startswith("2 of 28 prompts lost up to 204 tokens at their beginning: the engine's context is")
    samples = live.samples(point.id)
    told = {(sample.dataset, len(sample.prompt)): sample.more for sample in samples if sample.more}
    assert told == {("long_generate", 300): {"prompt_cut": 60.0}, ("long_choose", 450): {"prompt_cut": 204.0}}
    made = [sample.output for sample in samples if sample.dataset == "long_generate"]
    assert made == [row["filtered_resps"][0] for row in expected["samples"]["long_generate"]]
    likely = [max(float(reply[0]) for reply in row["filtered_resps"]) for row in expected["samples"]["long_choose"]]
    assert [s.logprob for s in samples if s.dataset == "long_choose"] == pytest.approx(likely, abs=1e-3)
    rolling = [float(sample.output) for sample in samples if sample.dataset == "long_rolling"]
    whole = [float(row["filtered_resps"][0]) for row in expected["samples"]["long_rolling"]]
    assert rolling == pytest.approx(whole, abs=1e-2), "of 20 tokens, and of 600 in three windows: nothing is lost"
