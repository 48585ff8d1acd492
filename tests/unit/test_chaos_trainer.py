"""The simulated trainer: what it does at each of its faults, over a service in memory, and how it goes on after one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval_service.chaos.diary import Diary
from eval_service.chaos.faults import FaultKind
from eval_service.chaos.trainer import SimulatedTrainer, TrainerSpec
from eval_service.contract.client import EvalClient
from eval_service.contract.errors import Unavailable
from eval_service.contract.outbox import Outbox
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import DispatchReply, DispatchRequest, Granted, PlannedPoint, PointRef, Receipt, RunSpec


class Dead(Exception):
    """Stands for a SIGKILL of this process."""


class MemoryService(EvalClient):
    """Grants everything, or is away; keeps what it was sent."""

    def __init__(self) -> None:
        super().__init__("http://service.invalid")
        self.away = False
        self.sent: list[DispatchRequest] = []
        self.reports: list[str] = []
        self.planned: list[PlannedPoint] = []

    def put_run(self, run: str, spec: RunSpec) -> Any:
        self._here()

    def dispatch(self, request: DispatchRequest) -> DispatchReply:
        self._here()
        self.sent.append(request)
        point = PointRef(id="p1", suite="main", state=PointState.RESERVED)
        outcome = Granted.GRANTED if request.snapshot is None else Granted.TAKEN
        return DispatchReply(
            run=request.run, step=request.step, reservation=request.reservation, outcome=outcome, points=(point,)
        )

    def report(self, point: str, detail: str, reason: Reason = Reason.EXPORT_FAILED) -> Any:
        self._here()
        self.reports.append(detail)

    def drain(self, run: str, **asked: Any) -> Receipt:
        self._here()
        self.planned = list(asked["planned"])
        return Receipt(drain="d", run=run, open=False, drained=True, started_at=0, deadline=1)

    def _here(self) -> None:
        if self.away:
            raise Unavailable("away")


Live = Callable[..., MemoryService]


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Live:
    """Lives one life with the faults given; the same run goes on in the next one."""

    def die(_pid: int, number: int) -> None:
        if number == signal.SIGKILL:
            raise Dead

    monkeypatch.setattr(os, "kill", die)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    for place in ("hidden", "stop"):
        (tmp_path / place).mkdir()

    def once(*kinds: FaultKind, steps: int = 2, variant: float = 0.5, away: bool = False) -> MemoryService:
        spec = TrainerSpec(
            run="alpha",
            url="http://service.invalid",
            spec=RunSpec(root=str(tmp_path / "runs"), suites=("main",)),
            seed=0,
            faults=tuple((number, kind, variant) for number, kind in enumerate(kinds)),
            prompts=tmp_path / "prompts.jsonl",
            diary=tmp_path / "diary.jsonl",
            hidden=tmp_path / "hidden",
            stop=tmp_path / "stop",
            least_steps=steps,
            pace_s=0.0,
            drain_timeout_s=1.0,
        )
        with MemoryService() as service:
            service.away = away
            SimulatedTrainer(spec, service).live()
        return service

    return once


def published(tmp_path: Path) -> list[str]:
    return sorted(path.name.split("-")[0] for path in (tmp_path / "runs/alpha").glob("step_*"))


def landed(tmp_path: Path) -> list[str]:
    return [entry["kind"] for entry in Diary(tmp_path / "diary.jsonl").events("landed")]


def test_without_a_fault_every_step_is_reserved_published_handed_over_and_drained(live: Live, tmp_path: Path) -> None:
    service = live(steps=2)
    assert [(request.step, request.snapshot is not None) for request in service.sent] == [
        (0, False),
        (0, True),
        (1, False),
        (1, True),
    ]
    assert published(tmp_path) == ["step_0", "step_1"]
    assert [point.step for point in service.planned] == [0, 1]


def test_a_full_disk_leaves_nothing_and_is_reported(live: Live, tmp_path: Path) -> None:
    service = live(FaultKind.TRAINER_DISK_FULL, steps=1)
    assert service.reports == ["No space left on device"]
    assert list((tmp_path / "runs/alpha").iterdir()) == []
    [failed] = Diary(tmp_path / "diary.jsonl").events("failed")
    assert "No space left" in failed["detail"]


def test_a_trainer_that_dies_before_the_post_goes_on_and_sends_nothing_of_it_again(live: Live, tmp_path: Path) -> None:
    with pytest.raises(Dead):
        live(FaultKind.KILL_TRAINER_UNSENT, variant=0.9)
    assert published(tmp_path) == ["step_0"]
    service = live(FaultKind.KILL_TRAINER_UNSENT, steps=2, variant=0.9)
    assert {request.step for request in service.sent} == {1}
    assert landed(tmp_path) == [FaultKind.KILL_TRAINER_UNSENT]


@pytest.mark.parametrize(("variant", "count"), [(0.1, 1), (0.5, 2)])
def test_a_trainer_that_trains_the_step_again_comes_to_the_same_bytes_or_to_others(
    live: Live, tmp_path: Path, variant: float, count: int
) -> None:
    with pytest.raises(Dead):
        live(FaultKind.KILL_TRAINER_UNSENT, variant=variant)
    live(FaultKind.KILL_TRAINER_UNSENT, steps=1, variant=variant)
    assert published(tmp_path) == ["step_0"] * count


def test_a_trainer_that_dies_between_two_shards_publishes_nothing_and_then_the_same_step(
    live: Live, tmp_path: Path
) -> None:
    with pytest.raises(Dead):
        live(FaultKind.KILL_TRAINER_EXPORTING)
    assert published(tmp_path) == []
    live(FaultKind.KILL_TRAINER_EXPORTING, steps=1)
    assert published(tmp_path) == ["step_0"]


def test_while_the_service_is_away_it_keeps_as_many_as_it_may_and_those_that_a_fault_needs(
    live: Live, tmp_path: Path
) -> None:
    live(*[FaultKind.BAD_SNAPSHOT] * 3, steps=9, away=True)
    kept = [request for _, request in Outbox.of(tmp_path / "runs", "alpha").pending()]
    assert [(request.step, request.deferred) for request in kept] == [(0, True), (1, True), (2, True)]
    assert live(*[FaultKind.BAD_SNAPSHOT] * 3, steps=10).sent[:3] == kept


def test_a_damaged_outbox_file_is_all_there_is_of_the_request_but_for_the_published_one(
    live: Live, tmp_path: Path
) -> None:
    service = live(FaultKind.DAMAGED_OUTBOX, steps=1)
    assert [request.snapshot for request in service.sent] == [None]
    assert len(Outbox.of(tmp_path / "runs", "alpha").unreadable()) == 1
    assert published(tmp_path) == ["step_0"]


def test_late_files_are_hidden_before_the_post_and_told_first(live: Live, tmp_path: Path) -> None:
    live(FaultKind.LATE_FILES, steps=1)
    [hidden] = Diary(tmp_path / "diary.jsonl").events("hidden")
    assert Path(hidden["place"]).exists()
    assert not Path(hidden["path"]).exists()
