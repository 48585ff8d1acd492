"""The dashboard: a handful of files, read once, under a policy that lets a page load nothing from anywhere else; and
a route that only it needs.

What models and datasets wrote reaches a page as JSON alone, and the page makes text of it, never markup.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from eval_service.contract.curves import DrainPage
from eval_service.contract.errors import NotFound
from eval_service.gateway.services import Given

routes = APIRouter(tags=["dashboard"])
FILES = Path(__file__).parents[1] / "dashboard"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked for again each time, and answered with 304
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    headers: dict[str, str]


@routes.get("/", include_in_schema=False)
async def index(request: Request) -> Response:
    """The page; what it shows is in the part of the URL after `#`."""
    return _answer("index.html", request)


@routes.get("/dashboard/{path:path}", include_in_schema=False)
async def asset(path: str, request: Request) -> Response:
    """One of the dashboard's files."""
    return _answer(path, request)


@routes.get("/drains")
def list_drains(
    services: Given,
    run: str | None = None,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
) -> DrainPage:
    """Drains, the newest first; `GET /drains/{id}` has the receipt."""
    return services.curves.drains(run, offset=offset, limit=limit)


@cache
def _files() -> dict[str, _File]:
    """All there is by name: no path of a request ever reaches the file system."""
    found = {}
    for path in sorted(FILES.rglob("*")):
        if path.suffix in _TYPES:
            body = path.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            headers = {**HEADERS, "content-type": _TYPES[path.suffix], "etag": tag}
            found[path.relative_to(FILES).as_posix()] = _File(body, headers)
    return found


def _answer(name: str, request: Request) -> Response:
    file = _files().get(name)
    if file is None:
        raise NotFound("the dashboard has no such file")
    if request.headers.get("if-none-match") == file.headers["etag"]:
        return Response(status_code=304, headers=file.headers)
    return Response(file.body, headers=file.headers)
