"""An Inspect task against a checkpoint: inspect-ai needs no more than the lane's OpenAI address.

    export LANE_BASE_URL=$(evalfleet endpoint my-run 300)/v1 LANE_API_KEY=none
    inspect eval examples/inspect_task.py --model openai-api/lane/checkpoint

The model's name says nothing: a lane serves the one checkpoint that it was opened for.
"""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import exact
from inspect_ai.solver import generate

WORDS = ("cab", "bead", "deaf", "face")


@task
def sorted_letters() -> Task:
    """The letters of a word, in order."""
    return Task(
        dataset=[Sample(input=f"sort: {word}", target="".join(sorted(word))) for word in WORDS],
        solver=generate(),
        scorer=exact(),
        config=GenerateConfig(temperature=0.0, max_tokens=8),
    )
