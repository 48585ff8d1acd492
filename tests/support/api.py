"""The API over a ledger, with a controller that does its look as soon as it is woken, or is not there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from eval_service.access.keyring import Access
from eval_service.fleet_config import GroupConfig
from eval_service.gateway.app import build_app
from eval_service.gateway.bodies import BODY_S
from eval_service.gateway.services import Services
from eval_service.gateway.storage import Storage
from tests.support.ledger import Ledger

GROUPS = {
    "eval": GroupConfig(model=Path("/model"), num_engines=(0, 4)),
    "theirs": GroupConfig(kind="attached", model=Path("/model"), urls=("http://gpu-7:30000",)),
    "later": GroupConfig(kind="placeholder", num_engines=2),
}


@dataclass
class Api:
    """Routes of one gateway; `controller` says whether anybody carries commands out."""

    base: Path
    controller: bool = True
    woken: int = 0
    proxy_host: str | None = None
    url: str | None = None  # of the ledger; None: SQLite
    access: Access | None = None
    body_s: float = BODY_S
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = ledger = Ledger(self.base, self.url)
        address = (self.proxy_host, 8710) if self.proxy_host else None
        self.services = Services(ledger.db, ledger.bounds, "1.2.3", self._wake, GROUPS, address, self.access)
        self.services.storage = Storage(answer_s=60.0)  # a machine may be slow; storage that hangs is hung by tests
        self.app: FastAPI = build_app(self.services, body_s=self.body_s)

    def _wake(self) -> None:
        self.woken += 1
        if self.controller:
            self.ledger.look()

    def request(self, method: str, path: str, **request: Any) -> httpx.Response:
        """One request, on a loop of its own."""

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60.0) as client:
                return await client.request(method, path, **request)

        return asyncio.run(send())

    def get(self, path: str, **params: Any) -> Any:
        """The JSON of a 200."""
        return self._json(self.request("GET", path, params=params))

    def post(self, path: str, body: Any = None, *, status: int = 200) -> Any:
        """The JSON of an answer that has this status."""
        return self._json(self.request("POST", path, json=body), status)

    def put(self, path: str, body: Any) -> Any:
        """The JSON of a 200."""
        return self._json(self.request("PUT", path, json=body))

    def error(self, method: str, path: str, status: int, **request: Any) -> dict[str, Any]:
        """The inside of the envelope of an answer that has this status."""
        response = self.request(method, path, **request)
        assert response.status_code == status, response.text
        body = response.json()
        assert set(body) == {"error"}
        assert set(body["error"]) <= {"code", "message", "field", "hint"}
        assert body["error"]["code"]
        assert body["error"]["message"]
        return dict(body["error"])

    @staticmethod
    def _json(response: httpx.Response, status: int = 200) -> Any:
        assert response.status_code == status, response.text
        return response.json()
