"""Who a fault to the controller befalls, and what is seen of the engines when all faults are over."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from eval_service.chaos import inject
from eval_service.chaos.faults import Fault, FaultKind
from eval_service.chaos.fleet import Fleet
from eval_service.chaos.inject import Injector
from eval_service.chaos.victims import Part
from tests.support.views import engine


@pytest.mark.parametrize("pick", [0.0, 0.5, 0.99])
def test_the_lock_is_lost_by_who_has_it_and_not_by_a_controller_that_is_starting_or_ending(
    pick: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inject, "holders", lambda _: {2})
    found = [SimpleNamespace(pid=pid) for pid in (1, 2, 3)]
    victims: Any = SimpleNamespace(stopped=[], find=lambda _part, age_s: found)
    service: Any = SimpleNamespace(world=SimpleNamespace(lock=None))
    nothing: Any = None
    injector = Injector(service, victims, nothing, nothing, print, 0.0)
    fault = Fault(0, FaultKind.LOSE_LOCK, 0, pick, 1, None, 0.0)
    victim = injector._victim(fault, Part.CONTROLLER, at_work=True)
    assert victim is not None
    assert victim.pid == 2


def test_a_service_that_does_not_answer_at_once_makes_no_stray_of_its_engines() -> None:
    answers = itertools.chain([[], []], itertools.repeat([engine("eval-1", server_pid=4242, snapshot="d" * 32)]))
    service: Any = SimpleNamespace(views=lambda _: next(answers))
    victims: Any = SimpleNamespace(find=lambda part: [SimpleNamespace(pid=4242)] if part is Part.ENGINE else [])
    nothing: Any = None
    fleet = Fleet(nothing, service, victims, nothing, nothing, nothing, nothing, nothing)
    assert fleet._strays() == []
    assert fleet._pinned() == {"d" * 32}
