"""Suites as loaded: everything is read and checked at once, so a suite that exists can be run.

The digest covers what is asked and how it is scored, the datasets' bytes included, and not where they lie or what is
made of the scores: the points of suites with one digest can be compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from eval_service.contract.errors import ConfigError
from eval_service.fleet_config import validated
from eval_service.suites.config import SamplingConfig, SuiteConfig, SuitesConfig
from eval_service.suites.datasets import Dataset, Prompt, read_dataset
from eval_service.suites.functions import check_functions
from eval_service.suites.kinds import (
    FunctionConfig,
    FunctionConfigs,
    FunctionSuite,
    LmEvalConfigs,
    LmEvalSuite,
    load_function,
    load_lm_eval,
)
from eval_service.suites.scorer_config import SCORER_CONFIGS, Function
from eval_service.suites.scoring import ScorerCall
from eval_service.suites.sources import Source, module_beside
from eval_service.suites.texts import Parsed, parse

# Where the data lies, what is made of the scores, and what is kept beside the answers: none of it changes an answer.
_NOT_ASKED: Any = {
    "datasets": {"__all__": {"path": True, "weight": True, "fewshot": {"path"}}},
    "scorer": {"timeout_s"},
    "sampling": {"logprob"},
    "metric": True,
    "direction": True,
    "max_error_rate": True,
}


@dataclass(frozen=True, slots=True)
class Suite:
    """What is asked of a snapshot."""

    name: str
    digest: str
    config: SuiteConfig
    datasets: tuple[Dataset, ...]
    base: Path = Path()  # the suites file's directory
    modules: tuple[Source, ...] = ()  # of the user's own, as far as they lie beside the suites file

    @property
    def sources(self) -> tuple[Source, ...]:
        """All files that it was made of, the suites file apart."""
        return (*(source for dataset in self.datasets for source in dataset.sources), *self.modules)

    @property
    def scorer(self) -> str:
        """The scorer's name."""
        return self.config.scorer.called

    @property
    def call(self) -> ScorerCall:
        """What each output is scored with."""
        config = self.config.scorer
        options = config.options
        if isinstance(config, Function):
            options["directory"] = str(self.base)
        return ScorerCall(config.called, options, config.timeout_s)

    @property
    def sampling(self) -> SamplingConfig:
        """How answers are generated."""
        return self.config.sampling

    @property
    def headline(self) -> str:
        """The name of the metric that is the suite's score."""
        return self.config.headline

    @property
    def metric(self) -> str:
        """The scorer's metric, over all datasets."""
        return self.config.scorer.metric

    @property
    def max_error_rate(self) -> float:
        """The share of errored samples above which a point fails."""
        return self.config.max_error_rate

    def prompts(self) -> tuple[Prompt, ...]:
        """Every prompt, in the order of `Prompt.index`."""
        return tuple(row for dataset in self.datasets for row in dataset.rows)

    @property
    def size(self) -> int:
        """How many samples a point has."""
        return self.sampling.n * sum(len(dataset.rows) for dataset in self.datasets)

    def asks(self) -> Iterator[Ask]:
        """Every sample to be made, in the order of `Ask.index`: prompt by prompt."""
        n, greedy = self.sampling.n, self.sampling.temperature == 0
        for prompt in self.prompts():
            for sample in range(n):
                seed = None if greedy else sample_seed(self.sampling.seed, prompt.index, sample)
                yield Ask(prompt.index * n + sample, prompt, sample, seed)


@dataclass(frozen=True, slots=True)
class Ask:
    """One sample to be made; `seed` is None where the choice is greedy."""

    index: int
    prompt: Prompt
    sample: int
    seed: int | None


def sample_seed(seed: int, prompt: int, sample: int) -> int:
    """A sample's own seed, in [0, 2**31): the same wherever and whenever the sample is made."""
    return xxhash.xxh3_64_intdigest(f"{seed}:{prompt}:{sample}".encode()) >> 33


AnySuite = Suite | LmEvalSuite | FunctionSuite


def functions_of(suites: Mapping[str, AnySuite]) -> frozenset[str]:
    """The names of those that are checkpoint eval functions."""
    return frozenset(name for name, suite in suites.items() if isinstance(suite, FunctionSuite))


def check_served(suites: Mapping[str, AnySuite], *, has_proxy: bool) -> None:
    """Refuse what the fleet can't serve.

    Raises:
        ConfigError: lm-eval's tasks ask a lane of the proxy, and there is none.
    """
    for name, suite in suites.items():
        if isinstance(suite, LmEvalSuite) and not has_proxy:
            hint = "set service.proxy_port in fleet.toml, such as 8710"
            raise ConfigError(
                "lm-eval's tasks ask through the proxy, which is off", field=f"suites.{name}.kind", hint=hint
            )


def load_suites(path: Path) -> dict[str, AnySuite]:
    """Read a suites file, TOML or YAML, and all of its datasets; import the user's functions, in a process.

    Raises:
        ConfigError: names the file, the line and the key, or the dataset's row and column.
    """
    parsed = parse(path)
    table, others = _by_kind(parsed.table)
    try:
        foreign = _load_foreign(others, path)
        if not table.get("suites") and foreign:
            return foreign
        config = validated(SuitesConfig, table, path)
    except ConfigError as exc:
        raise _with_line(ConfigError(exc.message, field=_as_written(exc.field), hint=exc.hint), parsed) from exc
    return {**_load_prompts(config, path, parsed), **foreign}


def _by_kind(table: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The file's table without the suites of others' kinds, and those alone."""
    suites = table.get("suites")
    if not isinstance(suites, dict):
        return table, {}
    foreign = {name: suite for name, suite in suites.items() if isinstance(suite, dict) and suite.get("kind") in _KINDS}
    return {**table, "suites": {name: suite for name, suite in suites.items() if name not in foreign}}, foreign


_KINDS: dict[str, type[LmEvalConfigs] | type[FunctionConfigs]] = {
    "lm_eval": LmEvalConfigs,
    "function": FunctionConfigs,
}


def _load_foreign(table: dict[str, Any], path: Path) -> dict[str, AnySuite]:
    base = path.resolve().parent
    found: dict[str, AnySuite] = {}
    for name, suite in table.items():
        config = validated(_KINDS[suite["kind"]], {"suites": {name: suite}}, path).suites[name]
        if isinstance(config, FunctionConfig):
            found[name] = load_function(name, config, base)
        else:
            found[name] = load_lm_eval(name, config, base)
    return found


def _load_prompts(config: SuitesConfig, path: Path, parsed: Parsed) -> dict[str, AnySuite]:
    base = path.resolve().parent
    functions = {
        name: suite.scorer.function for name, suite in config.suites.items() if isinstance(suite.scorer, Function)
    }
    try:
        sources = check_functions(functions, base)
    except ConfigError as exc:
        raise _with_line(exc, parsed) from exc
    return {name: _load(name, suite, base, parsed, sources.get(name)) for name, suite in config.suites.items()}


def _load(name: str, config: SuiteConfig, base: Path, parsed: Parsed, source: str | None) -> Suite:
    datasets: list[Dataset] = []
    for number, dataset in enumerate(config.datasets):
        try:
            datasets.append(read_dataset(dataset, config, base, sum(len(read.rows) for read in datasets)))
        except ConfigError as exc:
            key = f"suites.{name}.datasets.{number}" + (f".{exc.field}" if exc.field else "")
            raise _with_line(ConfigError(exc.message, field=key, hint=exc.hint), parsed) from exc
    modules: tuple[Source, ...] = ()
    if isinstance(config.scorer, Function) and (module := module_beside(config.scorer.function, base)) is not None:
        modules = (Source.read(module)[0],)
    return Suite(name, _digest(config, datasets, source), config, tuple(datasets), base, modules)


def _digest(config: SuiteConfig, datasets: list[Dataset], source: str | None) -> str:
    asked = config.model_dump(mode="json", exclude=_NOT_ASKED)
    asked["bytes"] = [dataset.digest for dataset in datasets]
    asked["source"] = source
    return xxhash.xxh3_128_hexdigest(json.dumps(asked, sort_keys=True).encode())


def _with_line(error: ConfigError, parsed: Parsed) -> ConfigError:
    number = parsed.line_of((error.field or "").split("."))
    where = f"line {number}: " if number else ""
    return ConfigError(where + error.message, field=error.field, hint=error.hint)


def _as_written(field: str | None) -> str | None:
    """A scorer is told apart by its name, which the validation puts into the key."""
    names = "|".join(SCORER_CONFIGS)
    return re.sub(rf"^(suites\.[^.]+\.scorer)\.({names})(?=\.|$)", r"\1", field) if field else None
