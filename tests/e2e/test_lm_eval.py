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

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

RUN = "harness"
DOCUMENTS = 12
TASKS = ["tiny_generate", "tiny_choose", "long_generate", "long_choose", "long_rolling"]
CONTEXT = 256  # of the tiny model
_HF = """
import json, sys
from eval_service.apart.lm_eval_worker import evaluate
from lm_eval.models.huggingface import HFLM
asked = json.loads(sys.argv[1])
model = HFLM(
    pretrained=asked["snapshot"], dtype="float32", device="cpu", batch_size=1, max_length=asked["max_length"]
)
found = evaluate(model, asked)
print("\\n" + json.dumps({"results": found["results"], "samples": found["samples"]}, default=str))
"""


def by_hf(live: Live) -> dict[str, Any]:
    """What the `hf` backend makes of the same tasks, with the length that docs/lm_eval.md tells of."""
    asked = {
        "snapshot": str(live.model), "tasks": TASKS, "path": str(live.base / "lm_tasks"),
        "num_fewshot": None, "limit": None, "seed": 0, "max_length": CONTEXT - 8,
    }  # fmt: skip
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", _HF, json.dumps(asked)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@dataclass(frozen=True, slots=True)
class Harness:
    """A point whose first worker was killed as it began, and what the `hf` backend makes of the same tasks."""

    point: PointView
    expected: dict[str, Any]
    killed: list[psutil.Process]


@pytest.fixture(scope="module")
def harness(live: Live) -> Harness:
    live.wait_engines()
    live.client.put_run(RUN, RunSpec(root=str(live.root), suites=("harness",), max_in_flight=10))
    request = DispatchRequest(
        run=RUN, step=0, suites=("harness",), kind=Kind.MANUAL, source=Source.CALLER, snapshot=str(live.model),
        reservation=str(uuid.uuid4()),
    )  # fmt: skip
    asked = live.client.dispatch(request).points[0].id
    wait_for(lambda: live.client.point(asked).state is PointState.RUNNING, "the point to run")
    killed = wait_for(lambda: workers(live), "its process")
    killed[0].kill()
    expected = by_hf(live)
    [point] = live.ended(RUN, 1, timeout_s=200)
    return Harness(point, expected, killed)


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
    assert all(sample.engine.startswith("eval-") for sample in samples if sample.dataset != "long_rolling")


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
