"""What the demo does, in numbers: sized so that two cores train and evaluate side by side in about two minutes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RUN = "demo"
SUITE = "letters"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line says."""

    out: Path
    kill: bool = True
    port: int = 0
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes, and what must be true at the end. The training set is as long as the run, so there is one epoch."""

    seed: int = 0
    num_steps: int = 400
    interval: int = 50
    batch_size: int = 64
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    eval_examples: int = 144
    max_new_tokens: int = 8
    engines: int = 2
    server_concurrency: int = 16
    keep: int = 2
    min_points: int = 6
    min_overlap: int = 3
    first_at_most: float = 0.2
    last_at_least: float = 0.8

    @property
    def train_examples(self) -> int:
        """Lines of the training set."""
        return self.num_steps * self.batch_size

    @property
    def steps(self) -> tuple[int, ...]:
        """Where the points lie: the base model, the cadence, the last step."""
        return (*range(0, self.num_steps, self.interval), self.num_steps)
