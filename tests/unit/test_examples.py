"""The example loop does what it says, against a service in memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from eval_service.contract.wire import Kind, Receipt, Source
from tests.support.fake_service import FakeService
from tests.support.views import receipt

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def own_loop() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_loop", ROOT / "examples/own_loop.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(own_loop: ModuleType, service: FakeService, root: Path) -> Receipt:
    def save(directory: Path) -> None:
        directory.mkdir(parents=True)

    client = service.connect("http://service")
    result: Receipt = own_loop.train(client, "mine", root, range(1, 6), save, interval=2, num_steps=5)
    return result


def test_the_loop_posts_the_cadence_and_the_last_step_and_drains_what_it_planned(
    own_loop: ModuleType, tmp_path: Path
) -> None:
    service = FakeService(receipts=[receipt()])
    assert trained(own_loop, service, tmp_path).drained
    assert [(request.step, request.kind, request.force) for request in service.dispatches] == [
        (2, Kind.PERIODIC, False),
        (4, Kind.PERIODIC, False),
        (5, Kind.FINAL, True),
    ]
    assert {request.source for request in service.dispatches} == {Source.CALLER}
    assert all(Path(request.snapshot or "").is_dir() for request in service.dispatches)
    assert [planned.step for planned in service.drains[0].planned] == [2, 4, 5]


def test_a_point_that_is_refused_stops_no_training(
    own_loop: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = FakeService(receipts=[receipt()], refused=frozenset({4}))
    trained(own_loop, service, tmp_path)
    assert len(service.dispatches) == 3
    assert "step 4 is not evaluated: snapshot: outside the roots" in capsys.readouterr().out
