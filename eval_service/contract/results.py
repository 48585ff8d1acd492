"""What a point amounts to, on the wire: metrics with their uncertainty, alarms, samples, comparisons, advice."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class Wire(BaseModel):
    """The base of everything on the wire."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Direction(StrEnum):
    """Which way is better."""

    MAX = "max"
    MIN = "min"

    def better(self, value: float, than: float) -> bool:
        """Whether a value is better than another one."""
        return value > than if self is Direction.MAX else value < than


class Metric(Wire):
    """A number with its uncertainty; docs/statistics.md says what each part is."""

    value: float
    stderr: float | None = Field(default=None, description="None: fewer than two independent values")
    n: int = Field(description="values that the mean is of: samples, or prompts for pass@k, pass^k and avg@k")
    low: float | None = Field(default=None, description="of the 95% interval")
    high: float | None = Field(default=None, description="of the 95% interval")
    prompts: int | None = Field(default=None, description="prompts that the samples cluster in; None: one sample each")


# --- alarms ---------------------------------------------------------------------------------------------------------


class AlarmKind(StrEnum):
    """What may be wrong with a run, as seen at a point."""

    TRUNCATION_JUMP = "truncation_jump"  # many more answers were cut than at the point before
    EOS_NEVER = "eos_never"  # not one answer ended by itself
    NOT_FINITE = "not_finite"  # scores or log-probs that are no finite numbers
    NONE_SCORED = "none_scored"  # there is no score at all
    SCORE_COLLAPSE = "score_collapse"  # worse than the point before, beyond both intervals
    ERROR_RATE = "error_rate"  # samples errored, more than half of what would fail the point
    SUITE_CHANGED = "suite_changed"  # the suite or its data is not what the point before was asked
    SUITE_STALE = "suite_stale"  # a file of the suite is not what the service read, and asks, any more
    PROMPT_CUT = "prompt_cut"  # prompts of lm-eval's tasks were too long, and lost their beginning


class Alarm(Wire):
    """One thing that is worth a look, with the evidence for it."""

    kind: AlarmKind
    message: str
    evidence: dict[str, float | int | str | None] = Field(default_factory=dict)


# --- samples --------------------------------------------------------------------------------------------------------


class SampleView(Wire):
    """What the model answered to one prompt, one of `sampling.n` times."""

    index: int = Field(description="over the whole suite: prompt by prompt, then sample by sample")
    prompt_index: int = Field(description="of the prompt, over the whole suite")
    sample_index: int = Field(default=0, description="which of the prompt's samples, from 0")
    seed: int | None = Field(default=None, description="that was sent with the request; None: greedy")
    dataset: str
    prompt: str
    answer: str
    output: str
    score: float | None
    error: str | None
    unparsed: bool = Field(default=False, description="no extractor found an answer in the output; its score is 0")
    finish_reason: str | None
    prompt_tokens: int
    output_tokens: int
    engine: str
    weight_version: str
    latency_s: float
    logprob: float | None = Field(default=None, description="sum over the output's tokens, where it was asked for")
    more: dict[str, float] = Field(
        default_factory=dict,
        description="scores beside the one that counts, by name; `prompt_cut`: tokens that a prompt of lm-eval's lost",
    )
    note: str | None = Field(default=None, description="what a score rests on: a judge's text, the choices' log-probs")


class SamplePage(Wire):
    """`GET /points/{id}/samples`."""

    samples: tuple[SampleView, ...]
    total: int


# --- comparisons ----------------------------------------------------------------------------------------------------


class Verdict(StrEnum):
    """What a comparison says of the second point."""

    BETTER = "better"
    WORSE = "worse"
    UNDECIDED = "undecided"  # the p-value is 0.05 or more, or there is none


class Compared(Wire):
    """One side of a comparison."""

    point: str
    run: str
    step: int
    mean: float | None = Field(description="over the prompts that both points scored")


class Flip(Wire):
    """A prompt whose score is another one at the second point, with a sample of each side that shows it."""

    prompt_index: int
    dataset: str
    score_a: float = Field(description="mean over the prompt's samples at `a`")
    score_b: float
    a: SampleView
    b: SampleView


class Comparison(Wire):
    """`GET /points/{a}/compare/{b}`: b minus a, over the prompts that both scored."""

    suite: str
    dataset: str | None = Field(description="None: all of them")
    direction: Direction
    a: Compared
    b: Compared
    prompts: int = Field(description="that both points scored")
    only_a: int = Field(description="prompts left out: only `a` scored them")
    only_b: int
    neither: int
    difference: float | None
    stderr: float | None
    low: float | None = Field(description="of the difference's 95% interval")
    high: float | None
    p_value: float | None
    method: str | None = Field(description="mcnemar_exact, paired_t or sign; None: too few prompts")
    verdict: Verdict
    improved: int = Field(description="prompts that `b` does better on")
    worsened: int
    flips: tuple[Flip, ...] = Field(description="a page of the prompts whose score changed")
    total: int = Field(description="prompts whose score changed")


# --- best and stop --------------------------------------------------------------------------------------------------


class Action(StrEnum):
    """What a trainer may do."""

    CONTINUE = "continue"
    STOP = "stop"


class Best(Wire):
    """The best point so far, tied to the content that was evaluated."""

    point: str
    step: int
    value: float
    stderr: float | None
    digest: str | None = Field(description="of the snapshot's content")
    snapshot: str | None = Field(description="its directory; None: it is deleted")
    kept: bool = Field(description="garbage collection leaves it: it is the best by the suite's headline, or held")


class Advice(Wire):
    """`GET /runs/{run}/advice`."""

    run: str
    suite: str
    metric: str
    direction: Direction
    patience: int
    action: Action
    why: str
    best: Best | None = Field(description="None: no point has a result yet")
    since_step: int | None = Field(description="the step of the last improvement by more than min_delta")
    since: float | None = Field(description="when that point ended")
    points_since: int = Field(description="later points with the metric, none of which improved on it")
    without: int = Field(description="done points that lack the metric; they count for nothing")
