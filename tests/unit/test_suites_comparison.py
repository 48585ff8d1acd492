"""Two points on the same prompts: agreed with scipy and statsmodels, and refused where they were asked other things."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar

from eval_service.contract.errors import Conflict, InvalidRequest, NotFound
from eval_service.contract.results import Direction, SampleView
from eval_service.suites.comparison import Page, Side, compare, paired
from eval_service.suites.samples import write_samples
from tests.support.views import sample

pairs = st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=2, max_size=50)


@settings(deadline=None)
@given(pairs)
def test_graded_scores_are_judged_by_the_paired_t_test_of_scipy(given_pairs: list[tuple[float, float]]) -> None:
    a, b = (list(side) for side in zip(*given_pairs, strict=True))
    differences = numpy.array(b) - numpy.array(a)
    assume(differences.std() > 1e-6)
    found, expected = paired(a, b, single=True), stats.ttest_rel(b, a)
    assert found.method == "paired_t"
    assert found.p_value is not None
    assert math.isclose(found.p_value, expected.pvalue, rel_tol=1e-6, abs_tol=1e-12)
    low, high = expected.confidence_interval(0.95)
    assert [found.low, found.high] == pytest.approx([low, high], rel=1e-6, abs=1e-9)
    assert found.stderr == pytest.approx(stats.sem(differences), rel=1e-9)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=60))
def test_right_or_wrong_is_judged_by_mcnemars_exact_test_of_statsmodels(flags: list[tuple[bool, bool]]) -> None:
    a, b = ([float(value) for value in side] for side in zip(*flags, strict=True))
    found = paired(a, b, single=True)
    table = [[sum(pair == (x, y) for pair in flags) for y in (True, False)] for x in (True, False)]
    assert found.method == "mcnemar_exact"
    assert found.p_value == pytest.approx(mcnemar(table, exact=True).pvalue, rel=1e-9)
    assert found.difference == pytest.approx(sum(b) / len(b) - sum(a) / len(a))


@settings(deadline=None)
@given(pairs)
def test_the_other_way_round_is_the_same_with_the_other_sign(given_pairs: list[tuple[float, float]]) -> None:
    a, b = (list(side) for side in zip(*given_pairs, strict=True))
    there, back = paired(a, b, single=False), paired(b, a, single=False)
    assert there.difference is not None
    assert back.difference == -there.difference
    assert there.p_value == back.p_value
    assert there.stderr == pytest.approx(back.stderr)


def test_where_there_is_nothing_to_go_by_nothing_is_claimed() -> None:
    nothing = paired([], [], single=True)
    assert (nothing.difference, nothing.p_value, nothing.method) == (None, None, None)
    one = paired([0.0], [1.0], single=True)
    assert (one.difference, one.stderr, one.low, one.p_value) == (1.0, None, None, 1.0)
    same = paired([0.3, 0.7, 0.7], [0.3, 0.7, 0.7], single=True)
    assert (same.difference, same.stderr, same.p_value) == (0.0, 0.0, 1.0)
    moved = paired([0.25, 0.5, 0.0], [0.5, 0.75, 0.25], single=False)
    assert (moved.difference, moved.stderr, moved.p_value, moved.method) == (0.25, 0.0, 0.25, "sign")


# --- of files


def side(tmp_path: Path, name: str, samples: list[SampleView], digest: str | None = "d" * 32, step: int = 1) -> Side:
    path = tmp_path / f"{name}.parquet"
    write_samples(path, samples)
    return Side(name, "r1", step, "letters", digest, path)


def rows(scores: list[float | None], **changes: Any) -> list[SampleView]:
    """None is an errored sample."""
    return [
        sample(i, **({"score": score, "error": None if score is not None else "no", "output": f"{score}"} | changes))
        for i, score in enumerate(scores)
    ]


def test_only_the_prompts_that_both_scored_count_and_the_others_are_told(tmp_path: Path) -> None:
    a = side(tmp_path, "a", rows([0, 0, 1, None, 1, None]))
    b = side(tmp_path, "b", rows([1, 1, 0, 1, None, None]), step=2)
    found = compare(a, b, direction=Direction.MAX)
    assert (found.prompts, found.only_a, found.only_b, found.neither) == (3, 1, 1, 1)
    assert [found.a.mean, found.b.mean, found.difference] == pytest.approx([1 / 3, 2 / 3, 1 / 3])
    assert (found.improved, found.worsened, found.total) == (2, 1, 3)


def test_flips_are_paged_with_both_outputs(tmp_path: Path) -> None:
    size = 30
    a = side(tmp_path, "a", rows([float(i % 3 == 0) for i in range(size)]))
    b = side(tmp_path, "b", rows([float(i % 2 == 0) for i in range(size)]))
    changed = [i for i in range(size) if (i % 3 == 0) != (i % 2 == 0)]
    seen = [f for at in range(0, size, 4) for f in compare(a, b, direction=Direction.MAX, page=Page(at, 4)).flips]
    assert [flip.prompt_index for flip in seen] == changed
    assert all(flip.a.index == flip.b.index == flip.prompt_index for flip in seen)
    assert all((flip.a.output, flip.b.output) == (f"{flip.score_a}", f"{flip.score_b}") for flip in seen)


def test_of_several_samples_a_prompt_is_one_pair_shown_by_what_changed(tmp_path: Path) -> None:
    def drawn(scores: list[list[float]]) -> list[SampleView]:
        return [
            sample(p * 2 + s, prompt_index=p, sample_index=s, score=score, output=f"{p}.{s}={score}")
            for p, own in enumerate(scores)
            for s, score in enumerate(own)
        ]

    a = side(tmp_path, "a", drawn([[1, 1], [0, 0], [1, 0]]))
    b = side(tmp_path, "b", drawn([[1, 0], [0, 1], [0, 1]]))
    found = compare(a, b, direction=Direction.MAX)
    assert (found.prompts, found.difference, found.method, found.total) == (3, 0.0, "paired_t", 2)
    assert [(f.score_a, f.score_b, f.a.output, f.b.output) for f in found.flips] == [
        (1.0, 0.5, "0.1=1", "0.1=0"),
        (0.0, 0.5, "1.0=0", "1.1=1"),
    ], "the better side's best sample, and the worse side's worst"


def test_less_can_be_better(tmp_path: Path) -> None:
    a, b = side(tmp_path, "a", rows([1.0] * 12)), side(tmp_path, "b", rows([0.0] * 12), step=2)
    assert compare(a, b, direction=Direction.MIN).verdict == "better"
    assert compare(a, b, direction=Direction.MAX).verdict == "worse"
    assert compare(a, b, direction=Direction.MIN).improved == 12
    assert compare(a, a, direction=Direction.MAX).verdict == "undecided"


def test_what_was_asked_other_things_is_refused_with_both_digests(tmp_path: Path) -> None:
    a, b = side(tmp_path, "a", rows([1, 0]), "a" * 32), side(tmp_path, "b", rows([1, 0]), "b" * 32)
    with pytest.raises(Conflict, match=r"aaaaaaaa.*bbbbbbbb") as caught:
        compare(a, b, direction=Direction.MAX)
    assert "again" in (caught.value.hint or "")


@pytest.mark.parametrize("change", [{"prompt": "another"}, {"answer": "another"}])
def test_points_of_an_older_version_must_have_the_same_prompts_and_answers(
    tmp_path: Path, change: dict[str, str]
) -> None:
    old = side(tmp_path, "old", rows([1, 0]), None)
    assert compare(old, side(tmp_path, "same", rows([0, 0])), direction=Direction.MAX).prompts == 2
    with pytest.raises(Conflict, match="same prompts"):
        compare(old, side(tmp_path, "other", rows([1, 0], **change)), direction=Direction.MAX)
    with pytest.raises(Conflict, match="same prompts"):
        compare(old, side(tmp_path, "more", rows([1, 0, 1])), direction=Direction.MAX)


def test_one_dataset_alone_can_be_compared(tmp_path: Path) -> None:
    both = [*rows([0, 0]), sample(2, score=0.0, dataset="other"), sample(3, score=1.0, dataset="other")]
    a, b = side(tmp_path, "a", both), side(tmp_path, "b", [s.model_copy(update={"score": 1.0}) for s in both])
    found = compare(a, b, direction=Direction.MAX, dataset="other")
    assert (found.prompts, found.neither, found.difference) == (2, 0, 0.5)
    with pytest.raises(InvalidRequest, match="no dataset 'gone'"):
        compare(a, b, direction=Direction.MAX, dataset="gone")


def test_of_empty_files_and_files_that_are_gone(tmp_path: Path) -> None:
    empty = side(tmp_path, "empty", [])
    found = compare(empty, empty, direction=Direction.MAX)
    assert (found.prompts, found.verdict, found.a.mean) == (0, "undecided", None)
    errored = side(tmp_path, "errored", rows([None, None]))
    assert compare(errored, errored, direction=Direction.MAX).neither == 2
    with pytest.raises(NotFound):
        compare(empty, Side("x", "r1", 1, "letters", None, tmp_path / "gone"), direction=Direction.MAX)
