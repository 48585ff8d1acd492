"""What a checkpoint eval function is given, and what it may raise. See docs/functions.md.

class Mine:
    def evaluate_checkpoint(self, snapshot_dir: Path, context: EvalContext) -> None: ...
    def dispose(self) -> None: ...
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval_service.contract.results import Metric, SampleView
from eval_service.contract.states import PinProof

__all__ = ["EvalContext", "EvalSkip"]
SAMPLES = "samples.jsonl"


class EvalSkip(Exception):
    """There is no number for this checkpoint, for a reason that is worth a name: the point is `skipped: eval_skip`."""


@dataclass(slots=True)
class EvalContext:
    """One checkpoint's evaluation. `scratch` is an empty directory that is deleted afterwards."""

    run: str
    step: int
    suite: str
    point: str
    scratch: Path
    canary: Mapping[str, Any] | None = None  # of the snapshot: `token_ids`, and the trainer's `logprobs` of them
    metrics: dict[str, Metric] = field(default_factory=dict)
    weight_version: str = ""
    pin_proof: PinProof = PinProof.UNPROVEN
    _samples: int = 0

    def metric(self, name: str, value: float, *, n: int, stderr: float | None = None) -> None:
        """Report a metric of `n` values.

        Raises:
            ValueError: it is no finite number, or n is below 1.
        """
        if not math.isfinite(value) or n < 1:
            raise ValueError(f"{name}: {value} of {n} values is no metric")
        self.metrics[name] = Metric(value=float(value), stderr=stderr, n=n)

    def pinned(self, weight_version: str, proof: str = "unproven") -> None:
        """Say what the backend was proven to hold: `canary`, `checksum`, `agreement` or `unproven`."""
        self.weight_version, self.pin_proof = weight_version, PinProof(proof)

    def sample(
        self, *, prompt: str, output: str, answer: str = "", score: float | None = None, error: str | None = None,
        dataset: str = "", finish_reason: str | None = None, prompt_tokens: int = 0, output_tokens: int = 0,
        engine: str = "", latency_s: float = 0.0, logprob: float | None = None,
    ) -> None:  # fmt: skip
        """Keep a sample, shown and compared like any other."""
        view = SampleView(
            index=self._samples, prompt_index=self._samples, dataset=dataset or self.suite, prompt=prompt,
            answer=answer, output=output, score=score, error=error, finish_reason=finish_reason,
            prompt_tokens=prompt_tokens, output_tokens=output_tokens, engine=engine,
            weight_version=self.weight_version, latency_s=latency_s, logprob=logprob,
        )  # fmt: skip
        with (self.scratch / SAMPLES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(view.model_dump(mode="json")) + "\n")
        self._samples += 1
