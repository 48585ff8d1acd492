"""The process that runs lm-eval's tasks against a lane, once: metrics to the parent, samples into a file."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any, TypeGuard

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from eval_service.apart.child import Parent
from eval_service.apart.lane_lm import LaneLM, LaneLost, Told, key_of
from eval_service.contract.results import AlarmKind, SampleView
from eval_service.functions import SAMPLES


def run(parent: Parent, asked: Mapping[str, Any]) -> None:
    """Evaluate, and tell what came of it."""
    model = LaneLM(
        asked["snapshot"],
        asked["url"],
        asked["weight_version"],
        concurrency=asked["concurrency"],
        key=asked["key"],
        context=asked["context"],
        progress=lambda total, done, seconds: parent.tell(total=total, made=done, seconds=seconds),
    )
    found = evaluate(model, asked)
    with (Path(asked["scratch"]) / SAMPLES).open("w", encoding="utf-8") as file:
        for sample in samples_of(found, model.told, asked):
            file.write(json.dumps(sample.model_dump(mode="json")) + "\n")
    parent.tell(metrics=metrics_of(found), cuts={**cuts_of(model.told), "context": model.context})


def evaluate(model: Any, asked: Mapping[str, Any]) -> dict[str, Any]:
    """lm-eval's own results, samples included. Data that a task of the user's names is looked for beside it."""
    with chdir(asked["path"] or "."):
        return _evaluated(model, asked)


def _evaluated(model: Any, asked: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = simple_evaluate(
        model=model,
        tasks=list(asked["tasks"]),
        task_manager=TaskManager(include_path=asked["path"]),
        num_fewshot=asked["num_fewshot"],
        limit=asked["limit"],
        log_samples=True,
        bootstrap_iters=0 if asked.get("quick") else 1000,
        random_seed=asked["seed"],
        numpy_random_seed=asked["seed"],
        torch_random_seed=asked["seed"],
        fewshot_random_seed=asked["seed"],
    )
    return found


def metrics_of(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`TASK/METRIC`, and `TASK/METRIC,FILTER` where there is one; the standard error is lm-eval's."""
    metrics: dict[str, dict[str, Any]] = {}
    for task, values in found["results"].items():
        count = found.get("n-samples", {}).get(task, {}).get("effective") or len(found["samples"].get(task, ())) or 1
        for key, value in values.items():
            name, _, which = key.partition(",")
            if not which or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{name}_stderr,{which}")
            told = f"{task}/{name}" if which == "none" else f"{task}/{name},{which}"
            metrics[told] = {"value": value, "stderr": stderr if isinstance(stderr, float) else None, "n": count}
    return metrics


def cuts_of(told: Mapping[tuple[Any, ...], Told]) -> dict[str, int]:
    """How many prompts lost their beginning, of how many, and the most tokens that one of them lost."""
    lost: dict[Any, int] = {}
    for (prompt, *_), circumstances in told.items():
        lost[prompt] = max(lost.get(prompt, 0), circumstances.cut)
    return {"cut": sum(map(bool, lost.values())), "prompts": len(lost), "most": max(lost.values(), default=0)}


def samples_of(
    found: Mapping[str, Any], told: Mapping[tuple[Any, ...], Told], asked: Mapping[str, Any]
) -> Iterator[SampleView]:
    """One a document and filter; where choices are compared, the preferred one with its log-likelihood."""
    index = 0
    for task, samples in found["samples"].items():
        for sample in samples:
            yield _sample(index, task, sample, told, asked)
            index += 1


def _sample(
    index: int, task: str, sample: Mapping[str, Any], told: Mapping[tuple[Any, ...], Told], asked: Mapping[str, Any]
) -> SampleView:
    requests, filtered = sample["arguments"], sample["filtered_resps"]
    likely: list[Any] = [reply[0] if isinstance(reply, list | tuple) else None for reply in filtered]
    chosen = max(range(len(likely)), key=lambda number: likely[number]) if all(_number(x) for x in likely) else 0
    request = requests[chosen]
    compared = bool(likely) and _number(likely[chosen])
    output = request[1] if compared and len(request) > 1 else filtered[0]
    circumstances = told.get(key_of(request))
    cut = max((told[key].cut for key in map(key_of, requests) if key in told), default=0)
    return SampleView(
        index=index,
        prompt_index=index,
        dataset=task,
        prompt=str(request[0]),
        answer=str(sample["target"]),
        output=output if isinstance(output, str) else json.dumps(output),
        score=_score(sample, task, asked["metric"]),
        error=None,
        finish_reason=None if compared or circumstances is None else circumstances.finish_reason,
        prompt_tokens=circumstances.prompt_tokens if circumstances else 0,
        output_tokens=0 if compared or circumstances is None else circumstances.output_tokens,
        engine=circumstances.engine if circumstances else "",
        weight_version=asked["weight_version"],
        latency_s=circumstances.latency_s if circumstances else 0.0,
        logprob=float(likely[chosen]) if compared else None,
        more={AlarmKind.PROMPT_CUT.value: float(cut)} if cut else {},
        note=json.dumps({str(r[1]): value for r, value in zip(requests, likely, strict=False) if len(r) > 1})
        if compared
        else None,
    )


def _score(sample: Mapping[str, Any], task: str, headline: str) -> float | None:
    wanted = headline.removeprefix(f"{task}/").partition(",")[0]
    for name in (wanted, *sample.get("metrics", ())):
        if _number(value := sample.get(name)):
            return float(value)
    return None


def _number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float)


def main(parent: Parent) -> None:
    """One evaluation."""
    parent.tell(ready=True)
    asked = parent.asked()
    try:
        run(parent, asked)
    except LaneLost as exc:
        parent.tell(lost=str(exc))
    except Exception as exc:  # noqa: BLE001 - the process's edge: the point ends with it
        traceback.print_exc()
        parent.tell(crashed=f"{type(exc).__name__}: {exc}")


if __name__ == "__main__":
    main(Parent(int(sys.argv[1])))
