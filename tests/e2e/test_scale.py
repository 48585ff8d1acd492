"""Engines come and go while points run: asked for, and by the queued work; no sample and no point is lost."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval_service.contract.errors import InvalidRequest
from eval_service.contract.states import PointState
from eval_service.contract.wire import DispatchRequest, EngineState, GroupView, RunSpec, Source
from tests.support.live import DONE, PROMPTS, Live, serving, wait_for

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
SLOW = "\n[groups.eval.overrides]\nlatency_s = 1.0\n"


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service of its own with up to four fake engines, each slow enough to be caught at work."""
    base = Path(tmp_path_factory.mktemp("fakes"))
    with serving(base, grade="fake", bounds="[1, 4]", more=SLOW) as service:
        yield service


def group(live: Live) -> GroupView:
    return next(group for group in live.client.fleet().groups if group.name == "eval")


def dispatch(live: Live, run: str, step: int, suite: str) -> None:
    request = DispatchRequest(
        run=run,
        step=step,
        suites=(suite,),
        reservation=str(uuid.uuid4()),
        snapshot=str(live.model),
        source=Source.CALLER,
        force=True,
    )
    live.client.dispatch(request)


def settled(live: Live, engines: int, timeout_s: float = 60.0) -> None:
    """Wait until there are as many as wanted, all of them ready, and none more."""

    def look() -> bool:
        found = group(live)
        return (found.desired, found.actual, found.ready) == (engines, engines, engines)

    wait_for(look, f"{engines} engines", timeout_s)


def settled_at(live: Live, engines: int) -> None:
    """Wait until so many are there, in whatever state."""
    wait_for(lambda: group(live).actual == engines, f"{engines} engines")


def test_the_fleet_follows_scale_up_and_down_and_shows_desired_and_actual(fakes: Live) -> None:
    settled(fakes, 1)
    assert (group(fakes).least, group(fakes).most, group(fakes).sized_by) == (1, 4, "config")
    fakes.client.scale("eval", 4)
    settled(fakes, 4)
    fakes.client.scale("eval", 2)
    settled(fakes, 2)
    assert group(fakes).sized_by == "scale"
    assert [engine.state for engine in group(fakes).engines] == [EngineState.READY] * 2, "who left in order is not lost"
    with pytest.raises(InvalidRequest, match="1 to 4 engines"):
        fakes.client.scale("eval", 5)


def test_points_under_way_lose_nothing_while_engines_come_and_go(fakes: Live) -> None:
    fakes.client.put_run("swings", RunSpec(root=str(fakes.root), suites=("slow",), max_in_flight=9))
    fakes.client.scale("eval", 4)
    settled(fakes, 4)
    for step in range(6):
        dispatch(fakes, "swings", step, "slow")
    for engines in (1, 4, 2):
        wait_for(lambda: any(engine.in_flight for engine in group(fakes).engines), "work in flight")
        fakes.client.scale("eval", engines)
        settled_at(fakes, engines)
    points = fakes.ended("swings", 6)
    assert [point.state for point in points] == [DONE] * 6
    assert [point.attempts for point in points] == [1] * 6, "an engine that leaves costs a point no attempt"
    for point in points:
        samples = fakes.samples(point.id)
        assert len({sample.index for sample in samples}) == len(samples) == PROMPTS
        assert not any(sample.error for sample in samples)
        assert {sample.weight_version for sample in samples} == {point.weight_version}


@pytest.mark.destructive
def test_queued_points_bring_real_engines_up_from_zero_and_idleness_back_to_zero(live: Live) -> None:
    """The session's own engines: all of them end, two come for the work, and go when it is done."""
    live.client.put_run("tide", RunSpec(root=str(live.root), suites=("letters",), max_in_flight=9))
    live.client.scale("eval", None)  # the config's say: by the work
    try:
        wait_for(lambda: group(live).actual == 0, "no engine")
        assert group(live).sized_by == "work"
        for step in range(3):
            dispatch(live, "tide", step, "letters")
        wait_for(lambda: group(live).desired == 2, "two wanted")
        wait_for(lambda: group(live).actual == 2, "two engines")
        points = live.ended("tide", 3, timeout_s=180)
        assert {point.state for point in points} == {PointState.DONE}
        wait_for(lambda: (group(live).desired, group(live).actual) == (0, 0), "no engine again")
    finally:
        live.client.scale("eval", 2)  # they come while whatever runs next begins
