"""Evaluate a training loop of your own: anything that can write a Hugging Face directory will do.

Needs nothing of this project but `eval_service.contract` (pydantic, httpx, xxhash, safetensors).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from eval_service.contract.client import EvalClient
from eval_service.contract.errors import EvalfleetError
from eval_service.contract.wire import DispatchRequest, Kind, PlannedPoint, Receipt, RunSpec, Source

SUITE = "letters"


def train(
    client: EvalClient,
    run: str,
    root: Path,
    steps: Iterable[int],
    save: Callable[[Path], None],
    *,
    interval: int,
    num_steps: int,
) -> Receipt:
    """Train, have every `interval`-th step and the last one evaluated, and wait for what is still being evaluated.

    Args:
        root: a directory inside the service's roots.
        steps: does one optimizer step at a time and yields how many are completed.
        save: writes config, tokenizer and safetensors into a directory, as `save_pretrained` does.
    """
    client.put_run(run, RunSpec(root=str(root), suites=(SUITE,), num_steps=num_steps))
    planned = []
    for step in steps:
        final = step == num_steps
        if step % interval and not final:
            continue
        snapshot = root / f"{run}-hf" / f"step_{step}"
        save(snapshot)
        planned.append(PlannedPoint(step=step, suite=SUITE))
        request = DispatchRequest(
            run=run,
            step=step,
            kind=Kind.FINAL if final else Kind.PERIODIC,
            force=final,
            reservation=str(uuid.uuid4()),
            snapshot=str(snapshot),
            source=Source.CALLER,  # the directory is yours: it is evaluated, and never deleted
        )
        try:
            client.reserve(request, deadline_s=60)  # waits for room where the run is at its bound
        except EvalfleetError as error:  # evaluation never stops training
            print(f"step {step} is not evaluated: {error}")
    return client.drain(run, planned=planned, timeout_s=600)
