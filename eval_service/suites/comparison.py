"""The paired comparison of two points: what their samples say on the same prompts.

Each prompt is one pair, whatever the number of its samples; only prompts that both points scored count. One sample a
prompt, right or wrong, is judged by McNemar's exact test, anything else by the paired t-test of the prompts' means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import pyarrow.compute as pc

from eval_service.contract.errors import Conflict, InvalidRequest
from eval_service.contract.results import Compared, Comparison, Direction, Flip, SampleView, Verdict
from eval_service.suites.distributions import CONFIDENCE, sign_two_sided, t_quantile, t_two_sided
from eval_service.suites.samples import open_samples, rows_at

_TEXTS = ("prompt", "answer")


@dataclass(frozen=True, slots=True)
class Paired:
    """b minus a over pairs. `stderr` and the interval are None below two pairs, `p_value` of none at all."""

    difference: float | None
    stderr: float | None
    low: float | None
    high: float | None
    p_value: float | None
    method: str | None


@dataclass(frozen=True, slots=True)
class Side:
    """One point of a comparison, and where its samples lie."""

    point: str
    run: str
    step: int
    suite: str
    suite_digest: str | None
    path: Path


@dataclass(frozen=True, slots=True)
class Page:
    """Which of the flips are asked for."""

    offset: int = 0
    limit: int = 100


@dataclass(frozen=True, slots=True)
class Scores:
    """By prompt, of one point: means (NaN where none of its samples was scored), and the rows that show them best."""

    means: Any  # float64, one a prompt
    single: bool  # never more than one sample a prompt
    highest: Any  # the row of the best sample, -1 for none
    lowest: Any


@dataclass(frozen=True, slots=True)
class Difference:
    """What b's scores say beside a's: masks and means are by prompt, all of one length."""

    found: Paired
    verdict: Verdict
    a: Compared
    b: Compared
    has_a: Any
    has_b: Any
    changed: Any  # the prompts whose score is another one
    improved: int

    @property
    def prompts(self) -> int:
        """That both scored."""
        return int((self.has_a & self.has_b).sum())

    @property
    def worsened(self) -> int:
        """Prompts that b does worse on."""
        return len(self.changed) - self.improved


def paired(a: Sequence[float], b: Sequence[float], *, single: bool) -> Paired:
    """Compare scores of the same prompts, place by place.

    Args:
        single: each is the score of one sample, and no mean of several.
    """
    first, second = numpy.asarray(a, dtype=float), numpy.asarray(b, dtype=float)
    differences = second - first
    n = len(differences)
    if n == 0:
        return Paired(None, None, None, None, None, None)
    mean = math.fsum(differences) / n
    stderr = low = high = None
    if n > 1:
        spread = 0.0 if differences.min() == differences.max() else float(differences.std(ddof=1))
        stderr = spread / math.sqrt(n)
        reach = t_quantile(n - 1) * stderr
        low, high = mean - reach, mean + reach
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    binary = single and bool(numpy.isin(first, (0.0, 1.0)).all() and numpy.isin(second, (0.0, 1.0)).all())
    if binary:
        return Paired(mean, stderr, low, high, sign_two_sided(better, better + worse), "mcnemar_exact")
    if not stderr:  # nothing, or the same everywhere: only the signs are left to go by
        return Paired(mean, stderr, low, high, sign_two_sided(better, better + worse), "sign")
    return Paired(mean, stderr, low, high, t_two_sided(mean / stderr, n - 1), "paired_t")


def compare(a: Side, b: Side, *, direction: Direction, dataset: str | None = None, page: Page = Page()) -> Comparison:
    """Compare two points by their samples' files.

    Raises:
        Conflict: they were not asked the same.
        NotFound: a file is gone.
        InvalidRequest: no such dataset.
    """
    check_same_suite(a, b)
    with open_samples(a.path) as of_a, open_samples(b.path) as of_b:
        if not (a.suite_digest and b.suite_digest):
            _check_same_prompts(of_a, of_b)
        scores = scores_in(of_a, dataset), scores_in(of_b, dataset)
        told = difference((a, b), scores, direction)
        shown = told.changed[page.offset : page.offset + page.limit]
        return Comparison(
            suite=b.suite,
            dataset=dataset,
            direction=direction,
            a=told.a,
            b=told.b,
            prompts=told.prompts,
            only_a=int((told.has_a & ~told.has_b).sum()),
            only_b=int((told.has_b & ~told.has_a).sum()),
            neither=_neither((of_a, of_b), dataset, told.has_a | told.has_b),
            **asdict(told.found),
            verdict=told.verdict,
            improved=told.improved,
            worsened=told.worsened,
            flips=tuple(_flips((of_a, of_b), scores, shown)),
            total=len(told.changed),
        )


def check_same_suite(a: Side, b: Side) -> None:
    """See that two points were asked the same, as far as both tell what they were asked.

    Raises:
        Conflict: they were not.
    """
    if a.suite_digest and b.suite_digest and a.suite_digest != b.suite_digest:
        raise Conflict(
            f"suite {a.suite!r} (digest {a.suite_digest[:8]}) at step {a.step} is not {b.suite!r} "
            f"({b.suite_digest[:8]}) at step {b.step}: they were asked other things, or with other data",
            field="b",
            hint="evaluate one of the snapshots again under the suite as it is now",
        )


def difference(sides: tuple[Side, Side], scores: tuple[Scores, Scores], direction: Direction) -> Difference:
    """The second of two points beside the first."""
    means_a, means_b = _same_length(scores[0].means, scores[1].means)
    has_a, has_b = ~numpy.isnan(means_a), ~numpy.isnan(means_b)
    both = has_a & has_b
    found = paired(means_a[both], means_b[both], single=scores[0].single and scores[1].single)
    changed = numpy.flatnonzero(both & (means_a != means_b))
    up = int((means_b[changed] > means_a[changed]).sum())
    return Difference(
        found=found,
        verdict=_verdict(found, direction),
        a=_side(sides[0], means_a[both]),
        b=_side(sides[1], means_b[both]),
        has_a=has_a,
        has_b=has_b,
        changed=changed,
        improved=up if direction is Direction.MAX else len(changed) - up,
    )


def _verdict(found: Paired, direction: Direction) -> Verdict:
    if found.p_value is None or found.difference is None or found.p_value >= 1 - CONFIDENCE or not found.difference:
        return Verdict.UNDECIDED
    return Verdict.BETTER if direction.better(found.difference, 0.0) else Verdict.WORSE


def _side(side: Side, means: Any) -> Compared:
    mean = math.fsum(means) / len(means) if len(means) else None
    return Compared(point=side.point, run=side.run, step=side.step, mean=mean)


# --- from the files


def scores_in(file: Any, dataset: str | None = None) -> Scores:
    """A file's scores, of one dataset or all; reads narrow columns alone."""
    prompts, scored, values = _columns(file, dataset)
    size = int(prompts.max()) + 1 if len(prompts) else 0
    rows = numpy.flatnonzero(scored)
    own, scores = prompts[rows], values[rows]
    counts = numpy.bincount(own, minlength=size)
    sums = numpy.bincount(own, weights=scores, minlength=size)
    means = numpy.full(size, numpy.nan)
    numpy.divide(sums, counts, out=means, where=counts > 0)
    order = numpy.lexsort((rows, scores, own))  # by prompt, its lowest score first
    highest, lowest = numpy.full(size, -1), numpy.full(size, -1)
    highest[own[order]] = rows[order]
    lowest[own[order][::-1]] = rows[order][::-1]
    return Scores(means, bool(counts.max(initial=0) <= 1), highest, lowest)


def _columns(file: Any, dataset: str | None) -> tuple[Any, Any, Any]:
    """Of each row: its prompt, whether it is scored (in the dataset), and its score."""
    prompt = "prompt_index" if "prompt_index" in file.schema_arrow.names else "index"
    table = file.read(columns=[prompt, "dataset", "score", "error"])
    scored = pc.and_(pc.is_valid(table["score"]), pc.is_null(table["error"]))
    if dataset is not None:
        of_it = pc.equal(table["dataset"], dataset)
        if len(table) and not pc.any(of_it).as_py():
            raise InvalidRequest(f"the samples have no dataset {dataset!r}", field="dataset")
        scored = pc.and_(scored, of_it)
    return table[prompt].to_numpy(), scored.to_numpy(), pc.fill_null(table["score"], 0.0).to_numpy()


def _neither(files: tuple[Any, Any], dataset: str | None, either: Any) -> int:
    """Prompts that neither point scored."""
    asked: set[int] = set()
    for file in files:
        prompt = "prompt_index" if "prompt_index" in file.schema_arrow.names else "index"
        table = file.read(columns=[prompt, "dataset"])
        if dataset is not None:
            table = table.filter(pc.equal(table["dataset"], dataset))
        asked |= set(pc.unique(table[prompt]).to_pylist())
    return len(asked) - int(either.sum())


def _same_length(a: Any, b: Any) -> tuple[Any, Any]:
    size = max(len(a), len(b))
    return tuple(numpy.concatenate([values, numpy.full(size - len(values), numpy.nan)]) for values in (a, b))  # type: ignore[return-value]


def _flips(files: tuple[Any, Any], scores: tuple[Scores, Scores], prompts: Any) -> list[Flip]:
    """With the best sample of the side that does better, and the other's worst."""
    up = scores[1].means[prompts] > scores[0].means[prompts]
    rows_a = numpy.where(up, scores[0].lowest[prompts], scores[0].highest[prompts])
    rows_b = numpy.where(up, scores[1].highest[prompts], scores[1].lowest[prompts])
    samples_a, samples_b = _by_row(files[0], rows_a), _by_row(files[1], rows_b)
    return [
        Flip(
            prompt_index=int(prompt),
            dataset=a.dataset,
            score_a=float(scores[0].means[prompt]),
            score_b=float(scores[1].means[prompt]),
            a=a,
            b=b,
        )
        for prompt, a, b in zip(prompts, samples_a, samples_b, strict=True)
    ]


def _by_row(file: Any, rows: Any) -> list[SampleView]:
    """The samples of these rows, in their order (files hold a prompt's samples together, so rows ascend too)."""
    ascending = sorted(int(row) for row in rows)
    found = dict(zip(ascending, rows_at(file, ascending), strict=True))
    return [found[int(row)] for row in rows]


def _check_same_prompts(a: Any, b: Any) -> None:
    """Of points whose suite's digest an older version did not keep: the texts themselves must agree."""
    same = a.metadata.num_rows == b.metadata.num_rows
    for batch_a, batch_b in zip(*(file.iter_batches(columns=list(_TEXTS)) for file in (a, b)), strict=False):
        same = same and batch_a.equals(batch_b)
        if not same:
            raise Conflict("the two points were not asked the same prompts", field="b")
