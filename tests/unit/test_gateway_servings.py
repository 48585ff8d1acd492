"""`/points/{id}/serve` over a ledger: who may be served, under which address, and what it keeps alive."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval_service.contract.serving import ServingView
from eval_service.contract.states import PointState, Reason
from eval_service.ledger.moves import Facts
from eval_service.ledger.servings import Outlook, ServingMoves
from tests.support.api import Api


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Api:
    monkeypatch.setattr("eval_service.gateway.services.CARRY_OUT_S", 0.0)
    return Api(tmp_path, proxy_host="10.0.0.1")


def moves(api: Api) -> ServingMoves:
    return ServingMoves(api.ledger.db, api.ledger.moves.epoch)


def test_a_serving_tells_its_address_at_once_and_its_engines_once_there_are_some(api: Api) -> None:
    point = api.ledger.done(1)
    view = ServingView.model_validate(api.post(f"/points/{point}/serve", {"for_s": 60}, status=202))
    assert (view.url, view.engines, view.open) == (f"http://10.0.0.1:8710/lanes/{point}", 0, True)
    assert [found.id for found in moves(api).look()[0]] == [point]
    moves(api).note(point, Outlook(1, "label", None))
    assert api.post(f"/points/{point}/serve", {"for_s": 60})["weight_version"] == "label"
    assert api.get(f"/points/{point}/serve")["engines"] == 1


def test_asked_again_the_time_begins_anew_and_it_ends_by_itself(api: Api) -> None:
    point = api.ledger.done(1)
    api.post(f"/points/{point}/serve", {"for_s": 60}, status=202)
    api.ledger.clock.turn(50)
    api.post(f"/points/{point}/serve", {"for_s": 60}, status=202)
    api.ledger.clock.turn(50)
    assert moves(api).look()[1] == []
    api.ledger.clock.turn(11)
    assert moves(api).look()[1] == [point]
    moves(api).forget([point])
    assert "is not served" in api.error("GET", f"/points/{point}/serve", 404)["message"]


def test_closing_ends_it_and_opening_it_while_it_closes_keeps_it(api: Api) -> None:
    point = api.ledger.done(1)
    api.post(f"/points/{point}/serve", {}, status=202)
    answer = api.request("DELETE", f"/points/{point}/serve")
    assert (answer.status_code, answer.json()["open"]) == (202, False)
    over = moves(api).look()[1]
    api.post(f"/points/{point}/serve", {}, status=202)
    moves(api).forget(over)
    assert api.get(f"/points/{point}/serve")["open"] is True
    api.error("DELETE", "/points/none/serve", 404)


def test_what_cannot_be_served_says_why(api: Api) -> None:
    assert "no point" in api.error("POST", "/points/none/serve", 404, json={})["message"]
    queued = api.ledger.queued(1)
    assert "wait until it has ended" in api.error("POST", f"/points/{queued}/serve", 409, json={})["hint"]
    done = api.ledger.done(2)
    assert api.error("POST", f"/points/{done}/serve", 422, json={"for_s": 0})["field"] == "for_s"
    assert api.error("POST", f"/points/{done}/serve", 422, json={"for": 1})["field"] == "for"


def test_a_service_without_a_proxy_names_the_key_that_gives_it_one(tmp_path: Path) -> None:
    api = Api(tmp_path)
    point = api.ledger.done(1)
    assert "proxy_port" in api.error("POST", f"/points/{point}/serve", 409, json={})["hint"]


def test_a_proxy_that_listens_everywhere_is_told_by_the_name_that_the_service_was_reached_by(tmp_path: Path) -> None:
    api = Api(tmp_path, proxy_host="0.0.0.0")
    point = api.ledger.done(1)
    assert api.post(f"/points/{point}/serve", {}, status=202)["url"].startswith("http://gateway:8710/lanes/")


def let_go_of(api: Api, step: int) -> str:
    """A point that has ended, whose snapshot nobody has held since, so that it may be another by now."""
    point = api.ledger.done(step)
    snapshot = str(api.ledger.snapshot(step)["id"])
    api.ledger.moves.note_links(snapshot, "/links")
    assert [held.snapshot for held in api.ledger.retention.let_go()] == [snapshot]
    return point


def test_what_was_let_go_of_is_checked_anew_before_it_is_served_and_then_held(api: Api) -> None:
    point = let_go_of(api, 1)
    api.post(f"/points/{point}/serve", {"for_s": 60}, status=202)
    assert moves(api).look() == ([], []), "neither served nor over"
    snapshot = api.ledger.moves.unadmitted()[0].id
    api.ledger.moves.note_links(snapshot, "/links")
    api.ledger.admit()
    assert [found.id for found in moves(api).look()[0]] == [point]
    assert api.ledger.retention.let_go() == [], "as long as it is served"
    api.ledger.clock.turn(61)
    moves(api).forget(moves(api).look()[1])
    assert [held.snapshot for held in api.ledger.retention.let_go()] == [snapshot]


def test_what_is_gone_or_another_by_now_is_not_served_and_its_point_stays_as_it_was(api: Api) -> None:
    gone, other = let_go_of(api, 1), let_go_of(api, 2)
    for point in (gone, other):
        api.post(f"/points/{point}/serve", {}, status=202)
    first, second = api.ledger.moves.unadmitted()
    api.ledger.moves.refuse(first.id, Reason.CKPT_MISSING, "it is gone")
    api.ledger.moves.admit(second.id, Facts(api.ledger.manifest(2, "b" * 32), vocab_size=32))
    assert moves(api).look() == ([], sorted([gone, other]))
    assert [api.ledger.state(point) for point in (gone, other)] == [PointState.DONE] * 2
