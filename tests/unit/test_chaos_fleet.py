"""Who a fault to the controller befalls, and what is seen of the engines when all faults are over."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eval_service.chaos import inject
from eval_service.chaos.faults import Fault, FaultKind
from eval_service.chaos.fleet import Fleet
from eval_service.chaos.inject import Injector
from eval_service.chaos.service import Service
from eval_service.chaos.victims import Part
from eval_service.scratch import Kind
from tests.support.views import engine

_STARTED = "INFO controller 9 -- Replica(id='a', app='c') started successfully on node 'd' after 1s (PID: {}).\n"


@pytest.mark.parametrize("pick", [0.0, 0.5, 0.99])
def test_the_lock_is_lost_by_who_has_it_and_not_by_a_controller_that_is_starting_or_ending(
    pick: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inject, "holders", lambda _: {2})
    found = [SimpleNamespace(pid=pid) for pid in (1, 2, 3)]
    victims: Any = SimpleNamespace(stopped=[], find=lambda _part: found)
    service: Any = SimpleNamespace(world=SimpleNamespace(lock=None), started=lambda: {1, 2})
    nothing: Any = None
    injector = Injector(service, victims, nothing, nothing, print, 0.0)
    fault = Fault(0, FaultKind.LOSE_LOCK, 0, pick, 1, None, 0.0)
    victim = injector._victim(fault, Part.CONTROLLER, to_replace=True)
    assert victim is not None
    assert victim.pid == 2


@pytest.mark.parametrize("part", [Part.CONTROLLER, Part.GATEWAY, Part.REPLICA])
def test_only_what_serve_has_seen_start_is_stopped_until_it_is_replaced(
    part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is taken, and a gateway answers, before Serve looks after them: it would never replace them then."""
    log = tmp_path / f"{Kind.RAY}x" / "session_1" / "logs" / "serve" / "controller_9.log"
    log.parent.mkdir(parents=True)
    monkeypatch.setattr(inject, "holders", lambda _: {1, 2})

    def wait_until(done: Callable[[], bool], _seconds: float) -> bool:
        assert not done()
        log.write_text(_STARTED.format(1) + _STARTED.format(2))
        return done()

    monkeypatch.setattr(inject, "wait_until", wait_until)
    victims: Any = SimpleNamespace(stopped=[], find=lambda _part: [SimpleNamespace(pid=pid) for pid in (2, 3)])
    nothing: Any = None
    service = Service(cast(Any, SimpleNamespace(lock=None)), victims, 0, 1, tmp_path)
    injector = Injector(service, victims, nothing, nothing, print, 0.0)
    victim = injector._victim(Fault(0, FaultKind.STOP_GATEWAY, 0, 0.99, 1, None, 0.0), part, to_replace=True)
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
