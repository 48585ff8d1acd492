"""When an engine counts as idle beside work, and a point as stuck: only while a controller acts and nothing changes."""

from __future__ import annotations

from typing import Any

import pytest

from eval_service.chaos.idleness import IDLE_S, STUCK_S, UNSERVED_S, Idleness, Moment

IDLE: dict[str, Any] = {"free": frozenset({"e0 n"}), "queued": frozenset({("p", 0)})}
UNSERVED: dict[str, Any] = {"free": frozenset({"e0 n"}), "under_way": frozenset({("p", 1, "pinning")})}
STUCK: dict[str, Any] = {"leased": frozenset({"p"}), "under_way": frozenset({("p", 1, "running")})}


def seen(*looks: tuple[float, dict[str, Any]]) -> Idleness:
    idleness = Idleness()
    for at, shown in looks:
        idleness.look(Moment(**{"at": at, "epoch": 1, "shown_at": at, **shown}))
    return idleness


@pytest.mark.parametrize(("shown", "limit_s"), [(IDLE, IDLE_S), (UNSERVED, UNSERVED_S), (STUCK, STUCK_S)])
def test_what_is_so_for_too_long_is_told_once_and_not_before(shown: dict[str, Any], limit_s: float) -> None:
    assert not seen((0, shown), (limit_s, shown)).told
    [line] = seen((0, shown), (limit_s + 1, shown), (limit_s + 2, shown)).told.values()
    assert f"{limit_s + 2:.0f} s" in line


@pytest.mark.parametrize(
    "between",
    [
        {"queued": IDLE["queued"]},  # the engine was leased, or was started anew
        {"free": IDLE["free"]},  # the point had its turn
        {"free": IDLE["free"], "queued": frozenset({("p", 1)})},  # as told by its attempts
        {**IDLE, "shown_at": 5.0},  # the controller was silent
        {**IDLE, "epoch": 2},  # another one acts
    ],
)
def test_what_changes_or_a_controller_that_does_not_act_begins_the_time_anew(between: dict[str, Any]) -> None:
    assert not seen((0, IDLE), (10, between), (IDLE_S + 9, IDLE)).told


def test_a_point_that_comes_on_is_not_without_an_engine_for_too_long() -> None:
    scoring = {**UNSERVED, "under_way": frozenset({("p", 1, "scoring")})}
    assert not seen((0, UNSERVED), (UNSERVED_S - 1, scoring), (UNSERVED_S + 5, scoring)).told
