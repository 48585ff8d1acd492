"""Best, advice and alarms as the ledger keeps them: whatever the order in which points come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval_service.contract.errors import InvalidRequest, NotFound
from eval_service.contract.results import Alarm, AlarmKind, Direction, Metric
from eval_service.contract.states import PointState
from eval_service.ledger.advising import Advisor, Question
from tests.support.ledger import Ledger, result

S = PointState


@pytest.fixture
def ledger(tmp_path: Path, database_url: str) -> Ledger:
    return Ledger(tmp_path, database_url)


def done(ledger: Ledger, step: int, score: float, *, digest: str | None = None, **changes: Any) -> str:
    """A point with a result, whose interval is narrow."""
    point = ledger.queued(step, digest or f"{step:032x}")
    ledger.go(point, S.SCORING)
    value = Metric(value=score, stderr=0.01, n=100, low=score - 0.02, high=score + 0.02)
    values = {"headline": "exact", "suite_digest": "d" * 32, "metrics": {"exact": value, "truncated": value}}
    assert ledger.moves.finish(point, result(score=score, **(values | changes)))
    return point


def kinds(ledger: Ledger, point: str) -> list[AlarmKind]:
    return [alarm.kind for alarm in ledger.point(point).alarms]


# --- best and advice


def test_advice_names_the_best_point_with_its_content_and_why(ledger: Ledger) -> None:
    for step, score in ((1, 0.2), (2, 0.6), (3, 0.5)):
        done(ledger, step, score)
        ledger.clock.turn(10)
    found = Advisor(ledger.db).advice("r1", Question(patience=1))
    assert (found.action, found.metric, found.since_step, found.points_since) == ("stop", "exact", 2, 1)
    assert found.best is not None
    assert (found.best.step, found.best.digest, found.best.value, found.best.stderr) == (2, f"{2:032x}", 0.6, 0.1)
    assert (found.best.kept, found.best.snapshot) == (True, str(ledger.path(2, f"{2:032x}")))
    assert found.since == ledger.point(found.best.point).ended_at
    assert Advisor(ledger.db).advice("r1", Question(patience=2)).action == "continue"


def test_advice_before_the_first_point_is_to_go_on(ledger: Ledger) -> None:
    ledger.reach(S.FAILED, 1)
    found = Advisor(ledger.db).advice("r1")
    assert (found.action, found.best, found.since, found.suite) == ("continue", None, None, "main")


def test_a_metric_that_no_point_has_is_refused_by_name(ledger: Ledger) -> None:
    done(ledger, 1, 0.5)
    with pytest.raises(InvalidRequest, match=r"metric: no point of run r1 has .* 'f1' \(there is exact, truncated"):
        Advisor(ledger.db).advice("r1", Question(metric="f1"))
    with pytest.raises(InvalidRequest, match="no suite 'gone'"):
        Advisor(ledger.db).advice("r1", Question(suite="gone"))
    with pytest.raises(NotFound):
        Advisor(ledger.db).advice("nothing")


def test_points_that_lack_the_metric_are_counted_and_count_for_nothing(ledger: Ledger) -> None:
    done(ledger, 1, 0.5, metrics={"exact": Metric(value=0.5, n=1), "other": Metric(value=0.1, n=1)})
    done(ledger, 2, 0.4)
    found = Advisor(ledger.db).advice("r1", Question(metric="other", patience=1))
    assert (found.without, found.points_since, found.action) == (1, 0, "continue")


def test_where_less_is_better_the_suite_says_so_to_advice_and_garbage_collection(ledger: Ledger) -> None:
    for step, loss in ((1, 2.0), (2, 1.0), (3, 1.5)):
        done(ledger, step, loss, direction=Direction.MIN)
    found = Advisor(ledger.db).advice("r1")
    assert found.best is not None
    assert (found.best.step, found.direction, found.best.kept) == (2, "min", True)
    assert {row.step: row.best for row in ledger.retention.on_storage()} == {1: False, 2: True, 3: False}
    other = Advisor(ledger.db).advice("r1", Question(direction=Direction.MAX)).best
    assert other is not None
    assert (other.step, other.kept) == (1, False), "it says that nobody keeps this one"


def test_the_best_of_a_step_that_was_trained_again_is_that_of_the_newer_content(ledger: Ledger) -> None:
    done(ledger, 1, 0.9, digest="a" * 32)
    done(ledger, 1, 0.3, digest="b" * 32)
    best = Advisor(ledger.db).advice("r1").best
    assert best is not None
    assert (best.value, best.digest) == (0.3, "b" * 32)


# --- alarms


def test_a_collapse_is_kept_on_the_point_with_the_evidence(ledger: Ledger) -> None:
    first = done(ledger, 1, 0.9)
    (alarm,) = ledger.point(done(ledger, 2, 0.5)).alarms
    assert (alarm.kind, alarm.evidence["point"], alarm.evidence["was"]) == (AlarmKind.SCORE_COLLAPSE, first, 0.9)
    assert kinds(ledger, first) == []


def test_a_point_that_comes_late_is_what_the_one_after_it_is_compared_with(ledger: Ledger) -> None:
    done(ledger, 1, 0.5)
    third = done(ledger, 3, 0.5)
    assert kinds(ledger, third) == []
    second = done(ledger, 2, 0.9)
    assert (kinds(ledger, second), kinds(ledger, third)) == ([AlarmKind.TRUNCATION_JUMP], [AlarmKind.SCORE_COLLAPSE])
    assert ledger.point(third).alarms[0].evidence["step"] == 2


def test_what_a_points_own_samples_raised_stays_when_its_neighbours_change(ledger: Ledger) -> None:
    eos = Alarm(kind=AlarmKind.EOS_NEVER, message="none ended", evidence={"answered": 9})
    point = done(ledger, 2, 0.5, alarms=(eos,))
    done(ledger, 1, 0.9)
    assert kinds(ledger, point) == [AlarmKind.EOS_NEVER, AlarmKind.SCORE_COLLAPSE]
    assert ledger.point(point).alarms[0] == eos


def test_data_that_changed_between_two_points_of_a_run_is_told(ledger: Ledger) -> None:
    done(ledger, 1, 0.9)
    assert kinds(ledger, done(ledger, 2, 0.1, suite_digest="e" * 32)) == [AlarmKind.SUITE_CHANGED]


def test_other_suites_and_superseded_points_are_nobodys_neighbours(ledger: Ledger) -> None:
    done(ledger, 1, 0.9, digest="a" * 32)
    done(ledger, 1, 0.5, digest="b" * 32)
    assert kinds(ledger, done(ledger, 2, 0.5)) == []
