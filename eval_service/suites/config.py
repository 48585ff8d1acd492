"""A suites file, TOML or YAML, as written: strict, frozen, no defaults that hide.

[suites.letters]
scorer = "exact"
max_error_rate = 0.05
sampling = { max_new_tokens = 16 }
datasets = [{ name = "reverse", path = "reverse.jsonl", limit = 100, seed = 0 }]
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from eval_service.contract.metric_keys import avg_at, pass_all, pass_at
from eval_service.contract.results import Direction
from eval_service.contract.wire import SuiteName
from eval_service.fleet_config import Section
from eval_service.suites.scorer_config import SCORER_CONFIGS, Exact, MultipleChoice, ScorerConfig


def attempts_told(n: int) -> tuple[int, ...]:
    """The k of pass@k and pass^k that n samples a prompt are told by: powers of two, and n."""
    return tuple(sorted({1 << power for power in range(n.bit_length())} | {n}))


class SamplingConfig(Section):
    """`sampling`: how an answer is generated."""

    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1, description="-1: all tokens")
    max_new_tokens: int = Field(default=256, ge=1)
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    n: int = Field(default=1, ge=1, le=1024, description="samples a prompt")
    seed: int = Field(default=0, ge=0, description="of every sample's own seed")
    logprob: bool = Field(default=False, description="ask for the log-prob sum of each output")

    @field_validator("top_k")
    @classmethod
    def _not_zero(cls, value: int) -> int:
        if value == 0:
            raise ValueError("0 leaves no token to choose; use -1 for all of them")
        return value

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n = {self.n} greedy samples of a prompt are all the same; set a temperature above 0")
        return self


class FewshotConfig(Section):
    """`fewshot`: solved examples before each question."""

    n: int = Field(ge=1, le=64, description="examples, drawn anew for each row")
    path: Path | None = Field(default=None, description="where they are drawn from; None: the dataset itself")
    split: str | None = Field(default=None, description="of that directory")
    seed: int = 0
    separator: str = Field(default="\n\n", description="after each example; of rendered prompts")
    between: str = Field(default=" ", description="between an example's prompt and its answer; of rendered prompts")


class DatasetConfig(Section):
    """`datasets`: a file or directory, and which columns of it are what."""

    name: SuiteName
    path: Path = Field(description="JSONL, Parquet, or what `save_to_disk` wrote; relative to the suites file")
    split: str | None = Field(default=None, description="of a directory that holds several")
    prompt: str = Field(default="prompt", min_length=1, description="column with the prompt, or the chat messages")
    answer: str = Field(default="answer", min_length=1, description="column with the expected answer")
    prompt_ids: str | None = Field(default=None, description="column with token ids, sent in the text's place")
    choices: str = Field(default="choices", min_length=1, description="column with multiple choice's choices")
    limit: int | None = Field(default=None, ge=1, description="rows, drawn with `seed`; None: all of them")
    seed: int = 0
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="in the metrics over all datasets")
    fewshot: FewshotConfig | None = None


class SuiteConfig(Section):
    """`[suites.NAME]`."""

    kind: Literal["prompts"] = "prompts"
    datasets: tuple[DatasetConfig, ...] = Field(min_length=1)
    sampling: SamplingConfig = SamplingConfig()
    scorer: ScorerConfig = Exact()
    metric: str | None = Field(default=None, description="the headline; None: the scorer's, over all datasets")
    direction: Direction = Field(default=Direction.MAX, description="whether more or less of the headline is better")
    max_error_rate: float = Field(default=0.05, ge=0, le=1, description="more errored samples fail the point")
    prompt_format: Literal["rendered", "chat"] = "rendered"

    @field_validator("scorer", mode="before")
    @classmethod
    def _known_scorer(cls, value: object) -> object:
        """A name alone is a scorer without keys."""
        table: object = {"name": value} if isinstance(value, str) else value
        if isinstance(table, dict):
            name = table.get("name")
            if name is None:
                raise ValueError('name: it has no name, such as { name = "exact" }')
            if name not in SCORER_CONFIGS:
                raise ValueError(f"there is no scorer {name!r}; there are {', '.join(sorted(SCORER_CONFIGS))}")
        return table

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        names = [dataset.name for dataset in self.datasets]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"datasets: the name {twice[0]!r} is used twice")
        if self.headline not in self.metrics:
            raise ValueError(f"metric: there is no {self.headline!r}; there are {', '.join(self.metrics)}")
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.chooses and self.prompt_format == "chat":
            raise ValueError("prompt_format: multiple choice asks rendered prompts; leave it out")
        if self.chooses and self.sampling.n > 1:
            raise ValueError("sampling.n: multiple choice generates nothing, so that n samples are all the same")
        for number, dataset in enumerate(self.datasets):
            if dataset.prompt_ids is not None and (self.prompt_format == "chat" or self.chooses or dataset.fewshot):
                raise ValueError(
                    f"datasets.{number}.prompt_ids: token ids are sent as they stand; "
                    "no chat template, few-shot example or choice can be put around them"
                )
        return self

    @property
    def chooses(self) -> bool:
        """Whether choices are compared by their log-likelihood, and nothing is generated."""
        return isinstance(self.scorer, MultipleChoice)

    @property
    def weighted(self) -> bool:
        """Whether the metrics over all datasets weigh these, and not each sample the same."""
        return len({dataset.weight for dataset in self.datasets}) > 1

    @property
    def metrics(self) -> tuple[str, ...]:
        """What may be the headline: the scorer's metrics, pass@k and so on, over all datasets, then by dataset."""
        names = [self.scorer.metric]
        if (n := self.sampling.n) > 1:
            told = attempts_told(n)
            names += [*(pass_at(k) for k in told), *(pass_all(k) for k in told if k > 1), avg_at(n)]
        names += self.scorer.more_metrics
        return (*names, *(f"{dataset.name}/{name}" for dataset in self.datasets for name in names))

    @property
    def headline(self) -> str:
        """The name of the suite's one number."""
        return self.metric or self.scorer.metric


class SuitesConfig(Section):
    """The whole of a suites file."""

    suites: dict[SuiteName, SuiteConfig] = Field(min_length=1)
