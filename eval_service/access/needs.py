"""Which scope a request needs. What is not listed needs the most: a new route that changes something is admin's."""

from __future__ import annotations

import re

from eval_service.access.config import Scope

_READS = frozenset({"GET", "HEAD"})
# Nothing of runs, points or engines is in these: a page must come before it can ask for a token.
_OPEN = re.compile(r"/|/dashboard/.*|/healthz")
_DISPATCH = re.compile(
    r"POST /dispatch|POST /drain"
    r"|PUT /runs/[^/]+|POST /runs/[^/]+/(?:progress|pause|resume|cancel|backfill)"
    r"|POST /points/[^/]+/(?:report|retry|cancel|hold|release|serve)|DELETE /points/[^/]+/serve"
)


def needed(method: str, path: str) -> Scope | None:
    """The least scope that will do; None: anybody may.

    Args:
        path: as it is routed, its escapes resolved.
    """
    if method in _READS:
        return None if _OPEN.fullmatch(path) else Scope.READ
    return Scope.DISPATCH if _DISPATCH.fullmatch(f"{method} {path}") else Scope.ADMIN
