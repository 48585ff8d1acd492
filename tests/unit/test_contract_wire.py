"""Requests are strict: what a user gets wrong is refused at the edge, by field."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from eval_service.contract.wire import DispatchRequest, DrainRequest, PlannedPoint, RunSpec

SOUND: dict[str, Any] = {"run": "r1", "step": 4, "reservation": "0" * 32}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"step": -1}, "step"),
        ({"step": 1.5}, "step"),
        ({"run": "a/b"}, "run"),
        ({"run": ".."}, "run"),
        ({"suites": ["../s"]}, "suites"),
        ({"reservation": "../../outbox"}, "reservation"),
        ({"digest": "zz"}, "digest"),
        ({"export_s": -1.0}, "export_s"),
        ({"export_s": float("nan")}, "export_s"),
        ({"wait_s": float("inf")}, "wait_s"),
        ({"kind": "later"}, "kind"),
        ({"source": "theirs"}, "source"),
        ({"scorer": "os:system"}, "scorer"),
    ],
    ids=str,
)
def test_a_dispatch_with_a_bad_field_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        DispatchRequest.model_validate({**SOUND, **change})
    assert caught.value.errors()[0]["loc"][0] == field


def test_a_request_survives_the_wire() -> None:
    request = DispatchRequest.model_validate({**SOUND, "suites": ["a"], "force": True, "stall_s": 0.5})
    assert DispatchRequest.model_validate_json(request.model_dump_json()) == request


@pytest.mark.parametrize("change", [{"keep": -1}, {"max_in_flight": 0}, {"suites": []}, {"overflow": "x"}], ids=str)
def test_a_run_that_can_not_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RunSpec.model_validate({"root": "/r", "suites": ["s"], **change})


def test_a_planned_point_is_a_step_and_a_suite() -> None:
    with pytest.raises(ValidationError):
        PlannedPoint.model_validate({"step": -1, "suite": "s"})
    with pytest.raises(ValidationError):
        DrainRequest.model_validate({"run": "r1", "timeout_s": -1})
