"""How many engines a group should have: asked for, by the work, or by the config; more at once, fewer after a while."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from eval_service.controller.scheduler import Claim
from eval_service.controller.sizing import Size, Sizes, worth
from eval_service.fleet_config import GroupConfig
from eval_service.ledger.moves import Runnable

IDLE_S = 60.0


class Now:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


def group(**changes: Any) -> GroupConfig:
    fields: dict[str, Any] = {"model": Path("/m"), "num_engines": (0, 4), "idle_timeout_s": IDLE_S}
    return GroupConfig(**(fields | changes))


def sizes(now: Now, before: int | None = None, **changes: Any) -> Sizes:
    return Sizes({"eval": group(**changes)}, {} if before is None else {"eval": before}, now)


def engines(found: Sizes) -> int:
    return found.now["eval"].engines


def claim(run: str, *, wants: int, held: int = 0, quota: int | None = None) -> Claim:
    texts = {name: "x" for name in ("id", "suite", "root", "snapshot", "snapshot_id", "digest", "tensor_digest")}
    numbers = dict.fromkeys(("seq", "step", "priority", "attempts", "vocab_size", "queued_at"), 1)
    fields: dict[str, Any] = {**texts, **numbers}
    point = Runnable(run=run, force=False, max_engines=quota, **fields)
    return Claim(point, wants, held)


def test_without_autoscale_and_unless_asked_there_are_as_many_as_the_config_says() -> None:
    found = sizes(Now(), num_engines=(1, 4))
    assert not found.decide({}, work=9)
    assert found.now["eval"] == Size(1, "config")


def test_what_is_asked_for_wins_over_config_and_work_and_auto_gives_the_say_back() -> None:
    found = sizes(Now(), autoscale=True)
    assert found.decide({"eval": 3}, work=1)
    assert found.now["eval"] == Size(3, "scale")
    found.decide({}, work=4)
    assert found.now["eval"] == Size(4, "work")


def test_a_count_that_was_asked_for_and_that_the_config_no_longer_allows_is_bounded() -> None:
    found = sizes(Now(), num_engines=(1, 2))
    found.decide({"eval": 9, "gone": 5}, work=0)
    assert engines(found) == 2


def test_queued_work_brings_engines_up_from_zero_at_once_and_idleness_back_to_zero_after_a_while() -> None:
    now = Now()
    found = sizes(now, autoscale=True)
    found.decide({}, work=2)
    assert engines(found) == 2
    now.s += 5
    found.decide({}, work=0)
    assert engines(found) == 2
    now.s += IDLE_S - 6
    found.decide({}, work=1)  # less than there are, but not nothing: not idle from now on, idle for one still
    now.s += 2
    found.decide({}, work=1)
    assert engines(found) == 1
    now.s += IDLE_S + 1
    found.decide({}, work=0)
    assert engines(found) == 0


def test_work_that_comes_back_within_the_idle_time_keeps_the_engines() -> None:
    now = Now()
    found = sizes(now, autoscale=True)
    found.decide({}, work=2)
    for _ in range(5):
        now.s += IDLE_S - 1
        found.decide({}, work=0)
        found.decide({}, work=2)
    assert engines(found) == 2


def test_the_work_is_bounded_by_the_config_both_ways() -> None:
    found = sizes(Now(), autoscale=True, num_engines=(1, 3))
    found.decide({}, work=40)
    assert engines(found) == 3
    assert engines(sizes(Now(), autoscale=True, num_engines=(1, 3))) == 1


def test_a_new_controller_keeps_the_count_and_lets_idle_engines_their_whole_time() -> None:
    now = Now()
    found = sizes(now, before=4, autoscale=True)
    found.decide({}, work=0)
    assert engines(found) == 4
    now.s += IDLE_S
    found.decide({}, work=0)
    assert engines(found) == 0


def test_a_run_is_worth_no_more_engines_than_its_quota() -> None:
    claims = [claim("a", wants=3, held=1), claim("a", wants=2), claim("b", wants=5, quota=2)]
    assert worth(claims) == 8


@pytest.mark.parametrize("changes", [{"kind": "frozen"}, {"kind": "attached", "urls": ("http://a:1",)}])
def test_only_the_group_that_points_queue_for_follows_the_work(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="autoscale: points queue for the pinned group"):
        group(autoscale=True, **changes)


def test_attached_engines_are_as_many_as_there_are_urls() -> None:
    theirs = group(kind="attached", urls=("http://a:1", "http://b:1"), num_engines=1)
    found = Sizes({"theirs": theirs}, {}, Now())
    found.decide({"theirs": 1}, work=0)
    assert found.now["theirs"] == Size(2, "config")
