"""`POST /fleet/{group}/scale`: what is written, and what is refused and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval_service.ledger.scaling import ScaleOrders
from tests.support.api import GROUPS, Api


@pytest.fixture
def api(tmp_path: Path) -> Api:
    return Api(tmp_path, controller=False)


def ordered(api: Api) -> dict[str, int]:
    return ScaleOrders(api.ledger.db, GROUPS).ordered()


def test_a_count_is_intent_in_the_ledger_that_needs_no_controller_and_the_last_one_counts(api: Api) -> None:
    assert ordered(api) == {}
    reply = api.post("/fleet/eval/scale", {"engines": 3})
    assert reply == {"group": "eval", "engines": 3, "least": 0, "most": 4}
    api.post("/fleet/eval/scale", {"engines": 0})
    assert ordered(api) == {"eval": 0}
    assert api.woken == 2
    api.post("/fleet/eval/scale", {"engines": None})
    assert ordered(api) == {}


@pytest.mark.parametrize("engines", [-1, 5])
def test_a_count_out_of_bounds_is_refused_and_the_bounds_are_named(api: Api, engines: int) -> None:
    error = api.error("POST", "/fleet/eval/scale", 422, json={"engines": engines})
    assert error["field"] == "engines"
    assert "0 to 4 engines" in error["message"]
    assert "groups.eval.num_engines" in error["hint"]
    assert ordered(api) == {}


@pytest.mark.parametrize(("group", "status", "said"), [
    ("theirs", 422, "not ours"),
    ("later", 422, "no engines"),
    ("nobody", 404, "no group"),
])  # fmt: skip
def test_what_has_no_engines_of_ours_cannot_be_scaled(api: Api, group: str, status: int, said: str) -> None:
    error = api.error("POST", f"/fleet/{group}/scale", status, json={"engines": 1})
    assert (error["field"], said in error["message"]) == ("group", True)


def test_a_fleet_that_another_version_has_shown_keeps_no_controller_from_acting(api: Api) -> None:
    scaling = ScaleOrders(api.ledger.db, GROUPS)
    assert scaling.decided() == {}
    api.ledger.moves.show_life('{"groups": [{"name": "eval", "count": 3}]}')
    assert scaling.decided() == {}


def test_what_is_no_count_is_refused(api: Api) -> None:
    for body in ({}, {"engines": "2"}, {"engines": True}, {"engines": 1.0}, {"engines": 1, "now": True}):
        assert api.error("POST", "/fleet/eval/scale", 422, json=body)["code"] == "invalid_request"
