"""The points of a curve beside each other: what is said, that no file is read twice, and that a call has an end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread

import pytest

from eval_service.contract.results import Direction, Verdict
from eval_service.suites.comparison import Side
from eval_service.suites.curve import Besides, Pair
from eval_service.suites.samples import open_samples, write_samples
from tests.support.views import sample

STEPS = (0, 200, 400, 600)
RIGHT = (10, 40, 40, 20)  # of 60 prompts


def side(base: Path, step: int, right: int, **changes: str | None) -> Side:
    path = base / "run" / "evals" / f"step_{step}.parquet"
    write_samples(path, [sample(index, float(index < right)) for index in range(60)])
    digest = changes.get("digest", "d" * 32)
    return Side(f"p{step}", "demo", step, "letters", digest, path)


@pytest.fixture
def sides(tmp_path: Path) -> list[Side]:
    return [side(tmp_path, step, right) for step, right in zip(STEPS, RIGHT, strict=True)]


def pairs_of(sides: Sequence[Side]) -> list[Pair]:
    return list(pairwise(sides))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were opened."""
    names: list[str] = []

    def spy(path: Path) -> object:
        names.append(path.stem)
        return open_samples(path)

    monkeypatch.setattr("eval_service.suites.curve.open_samples", spy)
    return names


def test_each_point_is_said_to_be_better_or_worse_than_the_one_before_it_or_neither(sides: list[Side]) -> None:
    better, same, worse = [found for found in Besides(budget_s=60).told(pairs_of(sides), Direction.MAX) if found]
    assert better.said.startswith("step 200 is better than step 0: +50.0 ± 6.5 points (p=")
    assert (better.verdict, better.improved, better.worsened, better.prompts) == (Verdict.BETTER, 30, 0, 60)
    assert same.said == "step 400 can't be told from step 200: +0.0 ± 0.0 points (p=1)"
    assert worse.said.startswith("step 600 is worse than step 400: -33.3 ± ")
    (found,) = Besides(budget_s=60).told([(sides[2], sides[3])], Direction.MIN)
    assert found is not None
    assert found.verdict is Verdict.BETTER, "where less is better"


def test_a_file_is_read_once_and_never_again(sides: list[Side], opened: list[str]) -> None:
    besides = Besides(budget_s=60)
    first = besides.told(pairs_of(sides), Direction.MAX)
    assert sorted(opened) == ["step_0", "step_200", "step_400", "step_600"]
    assert besides.told(pairs_of(sides), Direction.MAX) == first
    assert len(opened) == 4
    against = [(sides[0], one) for one in sides[1:]]
    assert None not in besides.told(against, Direction.MAX)
    assert len(opened) == 4 + 3, "step 200 beside step 0 is known; what all are held against is read once"


def test_a_call_has_an_end_and_asking_again_gets_there_from_the_newest_on(sides: list[Side], opened: list[str]) -> None:
    besides, pairs = Besides(budget_s=0.0), pairs_of(sides)
    assert besides.known(pairs, Direction.MAX) == [None] * 3
    assert opened == []
    for left in (2, 1, 0):
        found = besides.told(pairs, Direction.MAX)
        assert [one is None for one in found] == [True] * left + [False] * (3 - left)


def test_what_can_not_be_compared_says_why_and_a_file_that_comes_back_is_read(
    tmp_path: Path, sides: list[Side]
) -> None:
    other = side(tmp_path, 800, 30, digest="e" * 32)
    old = side(tmp_path, 900, 30, digest=None)
    gone = tmp_path / "gone.parquet"
    sides[1].path.rename(gone)
    besides = Besides(budget_s=60)
    pairs = [(sides[0], sides[1]), (sides[3], other), (other, old)]
    missing, changed, older = [found for found in besides.told(pairs, Direction.MAX) if found]
    assert (missing.difference, changed.difference, older.difference) == (None, None, None)
    assert "there are no samples at" in missing.said
    assert changed.said == "step 800 was asked other things than step 600, or with other data"
    assert "an older version recorded one of step 800 and step 900" in older.said
    assert besides.known(pairs, Direction.MAX)[0] is None, "a file that is gone may come back"
    gone.rename(sides[1].path)
    back = besides.told(pairs, Direction.MAX)[0]
    assert back is not None
    assert back.difference == pytest.approx(0.5)


def test_while_one_reads_others_get_what_there_is(sides: list[Side], monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on = Event(), Event()

    def slow(path: Path) -> object:
        reading.set()
        assert go_on.wait(60)
        return open_samples(path)

    besides, pairs = Besides(budget_s=60), pairs_of(sides)
    besides.told(pairs[-1:], Direction.MAX)
    monkeypatch.setattr("eval_service.suites.curve.open_samples", slow)
    reader = Thread(target=besides.told, args=(pairs, Direction.MAX))
    reader.start()
    try:
        assert reading.wait(60)
        assert [found is None for found in besides.told(pairs, Direction.MAX)] == [True, True, False]
    finally:
        go_on.set()
        reader.join(60)
    assert None not in besides.known(pairs, Direction.MAX)


def test_only_so_many_are_kept(sides: list[Side]) -> None:
    besides = Besides(budget_s=60, kept=2)
    besides.told(pairs_of(sides), Direction.MAX)
    assert [found is None for found in besides.known(pairs_of(sides), Direction.MAX)] == [False, False, True]
