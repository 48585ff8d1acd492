"""One envelope for every error, strict requests, a bound on bodies, and an OpenAPI document that matches."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from eval_service.contract.errors import BY_CODE
from eval_service.gateway.bodies import MAX_BODY_BYTES
from tests.support.api import Api

# The routes of the API, but for those that are still to come.
ROUTES = {
    *("POST /dispatch", "POST /drain", "GET /drains/{id}", "GET /status", "GET /events"),
    *("PUT /runs/{run}", "GET /runs", "GET /runs/{run}", "DELETE /runs/{run}"),
    *(f"POST /runs/{{run}}/{verb}" for verb in ("progress", "pause", "resume", "cancel", "backfill")),
    *("GET /points", "GET /points/{id}", "GET /points/{id}/samples", "GET /points/{a}/compare/{b}"),
    *("GET /runs/{run}/advice", "GET /runs/{run}/curve", "GET /drains"),
    *(f"POST /points/{{id}}/{verb}" for verb in ("report", "retry", "cancel", "hold", "release")),
    *("GET /fleet", "POST /fleet/{group}/scale", "GET /healthz", "GET /readyz", "GET /metrics"),
    *(f"{method} /points/{{id}}/serve" for method in ("POST", "GET", "DELETE")),
}


@pytest.fixture
def api(tmp_path: Path) -> Api:
    return Api(tmp_path)


def good() -> dict[str, Any]:
    return {"run": "r1", "step": 1, "reservation": str(uuid.uuid4())}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"step": -1}, "step"),
        ({"step": "many"}, "step"),
        ({"step": 1.5}, "step"),
        ({"step": 10**13}, "step"),
        ({"run": "../up"}, "run"),
        ({"run": "a/b"}, "run"),
        ({"run": ""}, "run"),
        ({"reservation": "not-a-uuid"}, "reservation"),
        ({"suites": ["no such"]}, "suites.0"),
        ({"suites": ["unheard"]}, "suites"),
        ({"suites": "main"}, "suites"),
        ({"kind": "weekly"}, "kind"),
        ({"source": "mine"}, "source"),
        ({"digest": "xyz"}, "digest"),
        ({"stall_s": -1}, "stall_s"),
        ({"priority": 10**30}, "priority"),
        ({"snapshot": "/etc"}, "snapshot"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_field_is_422_and_named(api: Api, change: dict[str, Any], field: str) -> None:
    error = api.error("POST", "/dispatch", 422, json=good() | change)
    assert (error["code"], error["field"]) == ("invalid_request", field)
    assert api.ledger.states() == []


def test_an_unknown_field_and_an_unknown_parameter_say_what_to_do(api: Api) -> None:
    error = api.error("POST", "/dispatch", 422, json=good() | {"colour": "red"})
    assert (error["message"], "remove it" in error["hint"]) == ("unknown field", True)
    error = api.error("GET", "/points", 422, params={"stat": "done"})
    assert (error["field"], "state" in error["hint"]) == ("stat", True)
    assert api.error("GET", "/status", 422, params={"x": 1})["hint"] == "this route has none"


@pytest.mark.parametrize(
    ("params", "field"),
    [({"limit": 0}, "limit"), ({"offset": -1}, "offset"), ({"state": "lost"}, "state"), ({"step": -1}, "step")],
)
def test_a_wrong_parameter_is_named(api: Api, params: dict[str, Any], field: str) -> None:
    assert api.error("GET", "/points", 422, params=params)["field"] == field


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"run": "\\ud800"}', b'{"step": NaN}'])
def test_a_body_that_is_no_such_object_is_422(api: Api, body: bytes) -> None:
    error = api.error("POST", "/dispatch", 422, content=body, headers={"content-type": "application/json"})
    assert error["code"] == "invalid_request"
    assert not str(error.get("field", "")).isdigit()


def test_the_run_in_a_path_is_checked_like_any_other(api: Api) -> None:
    spec = {"root": str(api.ledger.root), "suites": ["main"]}
    assert api.error("PUT", "/runs/.hidden", 422, json=spec)["field"] == "run"
    assert api.error("PUT", "/runs/r9", 422, json=spec | {"suites": []})["field"] == "suites"
    assert api.error("PUT", "/runs/r9", 422, json=spec | {"root": "/etc"})["field"] == "root"
    assert api.error("PUT", "/runs/r9", 422, json=spec | {"keep": -1})["field"] == "keep"


def test_an_unknown_route_and_a_wrong_method_have_the_envelope(api: Api) -> None:
    assert api.error("GET", "/nothing", 404)["code"] == "not_found"
    assert api.error("DELETE", "/dispatch", 405)["code"] == "method_not_allowed"


def test_a_conflict_is_409(api: Api) -> None:
    body = good()
    api.post("/dispatch", body, status=202)
    assert api.error("POST", "/dispatch", 409, json=body | {"step": 2})["code"] == "conflict"


# --- bodies


def test_a_body_of_a_mebibyte_is_read_and_one_byte_more_is_not(api: Api) -> None:
    detail = "x" * (MAX_BODY_BYTES - len(b'{"detail":""}'))
    body = f'{{"detail":"{detail}"}}'.encode()
    assert len(body) == MAX_BODY_BYTES
    json = {"content-type": "application/json"}
    assert api.error("POST", "/points/x/report", 422, content=body, headers=json)["field"] == "detail"
    assert api.error("POST", "/points/x/report", 413, content=body + b" ", headers=json)["code"] == "too_large"


def test_a_body_of_no_declared_length_is_cut_off_at_the_bound(api: Api) -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(64):
            sent += 1
            yield b" " * (MAX_BODY_BYTES // 16)

    json = {"content-type": "application/json"}
    assert api.error("POST", "/dispatch", 413, content=chunks(), headers=json)["code"] == "too_large"


@pytest.mark.parametrize("length", ["many", "-1", "1e3"])
def test_a_length_that_is_no_number_is_refused(api: Api, length: str) -> None:
    headers = {"content-type": "application/json", "content-length": length}
    assert api.error("POST", "/dispatch", 413, content=b"{}", headers=headers)["code"] == "too_large"


# --- what goes wrong here


def test_a_bug_is_500_internal_and_tells_no_secret(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("password=hunter2")

    monkeypatch.setattr(api.services.views, "runs", fail)
    error = api.error("GET", "/runs", 500)
    assert error["code"] == "internal"
    assert "RuntimeError" in error["message"]
    assert "hunter2" not in error["message"]


def test_a_ledger_that_cannot_be_used_is_503_with_a_time_to_come_back(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OperationalError("", {}, Exception("disk I/O error"))

    monkeypatch.setattr(api.ledger.db.engine, "connect", fail)
    response = api.request("GET", "/runs")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["code"] == "unavailable"


# --- the document


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def test_the_document_lists_every_route_and_no_other(api: Api) -> None:
    assert {name for name, _ in operations(api.get("/openapi.json"))} == ROUTES


def test_every_route_documents_the_one_envelope_and_no_other_error(api: Api) -> None:
    document = api.get("/openapi.json")
    assert "HTTPValidationError" not in document["components"]["schemas"]
    for name, operation in operations(document):
        schema = operation["responses"]["default"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorEnvelope"}, name
        assert operation["summary"], name
        assert operation["description"], name


@pytest.mark.parametrize(
    ("route", "codes"),
    [
        ("POST /dispatch", {"200", "202"}),
        ("POST /points/{id}/retry", {"200", "202"}),
        ("POST /runs/{run}/backfill", {"200", "202"}),
        ("DELETE /runs/{run}", {"202"}),
        ("POST /runs/{run}/progress", {"204"}),
        ("GET /points", {"200"}),
    ],
)
def test_the_document_has_the_statuses_that_are_answered(api: Api, route: str, codes: set[str]) -> None:
    found = dict(operations(api.get("/openapi.json")))[route]["responses"]
    assert set(found) - {"default"} == codes


def test_every_code_of_the_contract_has_one_class_and_is_a_word(api: Api) -> None:
    assert all(re.fullmatch(r"[a-z_]+", code) for code in BY_CODE)
    assert [cls.code for cls in BY_CODE.values()] == list(BY_CODE)
