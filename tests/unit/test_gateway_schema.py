"""Requests made of the API's own document (schemathesis): no 5xx, and no answer that the document does not have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from eval_service.access.config import Scope
from eval_service.access.keyring import Access, Keyring, Token, digest_of
from eval_service.access.needs import needed
from eval_service.gateway import dispatch, drains
from tests.support.api import Api

TOKEN = "the-token-of-this-test"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
ENDLESS = {"/events"}
EXAMPLES = 10


@pytest.fixture
def api(tmp_path: Path) -> Api:
    known = Keyring((Token("all", Scope.ADMIN, (digest_of(TOKEN.encode()),)),))
    return Api(tmp_path, access=Access(known), controller=False, proxy_host="127.0.0.1")


def asking(operation: Any, headers: dict[str, str], point: str, statuses: set[int], most: int) -> Callable[[], None]:
    """Makes requests of one operation, and checks their answers."""

    @settings(
        max_examples=most,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def call(case: Any) -> None:
        # A run and a point that there are, now and then: else all would be 404.
        for name, value in (("run", "r1"), ("id", point), ("a", point), ("b", point)):
            if name in (case.path_parameters or {}) and len(str(case.path_parameters[name])) % 2:
                case.path_parameters[name] = value
        response = case.call(headers=headers)
        statuses.add(response.status_code)
        away = response.status_code == 503 and response.json()["error"]["code"] == "unavailable"  # no controller acts
        case.validate_response(response, checks=CHECKS[1:] if away else CHECKS)

    return call


@pytest.mark.parametrize("token", [TOKEN, None], ids=["with a token", "without"])
def test_no_request_of_the_document_meets_a_fault_or_an_answer_that_it_does_not_have(
    api: Api, token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (dispatch, drains):
        monkeypatch.setattr(module, "LONG_POLL_S", 0.0)
    monkeypatch.setattr("eval_service.gateway.services.CARRY_OUT_S", 0.0)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    point = api.ledger.done(1)
    schema = schemathesis.openapi.from_asgi("/openapi.json", api.app, headers={"authorization": f"Bearer {TOKEN}"})
    asked = 0
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        if operation.path in ENDLESS:
            continue
        statuses: set[int] = set()

        asking(operation, headers, point, statuses, EXAMPLES if token else 3)()
        asked += 1
        if token is None and needed(operation.method.upper(), operation.path) is not None:
            assert statuses <= {401, 429}, operation.path  # who tries many tokens is bounded
        else:
            assert 401 not in statuses
    assert asked > 30
