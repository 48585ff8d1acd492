"""One request in, one answer out: which target, which route, and what the client is told when there is no answer.

Invariants: only the routes listed here reach an upstream (others of SGLang's change it, or tell its keys); what a
client sent as credentials stays here, and the upstream's are never sent to a client.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Collection
from urllib.parse import unquote_to_bytes

from router.errors import CutShort, NoTarget, RouterError
from router.exchange import Outlet, Request
from router.proxy.limits import ProxyLimits
from router.proxy.messages import ClientRequest, Refused, Response, passed_lines, refusal_of
from router.proxy.table import Targets
from router.proxy.tokens import token_fault
from router.router import Router

PREFIX = b"/lanes/"
# SGLang's native and OpenAI routes that answer from the weights and change nothing.
ROUTES: dict[bytes, bytes] = {
    b"/generate": b"POST",
    b"/encode": b"POST",
    b"/classify": b"POST",
    b"/tokenize": b"POST",
    b"/detokenize": b"POST",
    b"/v1/completions": b"POST",
    b"/v1/chat/completions": b"POST",
    b"/v1/embeddings": b"POST",
    b"/v1/score": b"POST",
    b"/v1/rerank": b"POST",
    b"/v1/tokenize": b"POST",
    b"/v1/detokenize": b"POST",
    b"/v1/models": b"GET",
    b"/model_info": b"GET",
    b"/get_model_info": b"GET",
}


class Service:
    """What the proxy does with a request. `keys`: SHA-256 of those that clients may bring; none: anybody may ask."""

    def __init__(
        self, router: Router, targets: Targets, limits: ProxyLimits | None = None, *, keys: Collection[bytes] = ()
    ) -> None:
        self.limits = limits or ProxyLimits()
        self._router = router
        self._targets = targets
        self._keys = tuple(keys)

    async def answer(self, request: ClientRequest, outlet: Outlet) -> Response | None:
        """The whole answer; None if it was passed on to `outlet`.

        Raises:
            CutShort: it was being passed on when it broke off.
        """
        try:
            if request.url == b"/healthz":
                return self._health()
            return await self._forwarded(request, outlet)
        except Refused as exc:
            return exc.response()
        except CutShort:
            raise
        except RouterError as exc:
            return refusal_of(exc).response()

    async def _forwarded(self, request: ClientRequest, outlet: Outlet) -> Response | None:
        self._authorize(request)
        name, path, query = _split(request.url)
        _check_route(request.method, path)
        target = self._targets.find(name)
        if request.body and target.vocab_size is not None and (fault := token_fault(request.body, target.vocab_size)):
            raise Refused(400, "bad_tokens", fault, hint="an id out of range would end the engine for everybody")
        sent = Request(request.method, path + query, request.headers, request.body)
        try:
            answer = await self._router.forward(name, sent, timeout_s=self.limits.request_timeout_s, outlet=outlet)
        except NoTarget:
            self._targets.find(name)  # says which kind of absence it is
            raise
        if answer.passed_on:
            return None
        return Response(answer.status, passed_lines(answer.tail, answer.headers), answer.body)

    def _authorize(self, request: ClientRequest) -> None:
        if not self._keys:
            return
        scheme, _, key = (request.authorization or b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        known = [hmac.compare_digest(digest, one) for one in self._keys]  # all of them, always
        if scheme.lower() == b"bearer" and any(known):
            return
        raise Refused(
            401,
            "unauthorized",
            "this proxy wants a key: `Authorization: Bearer KEY`",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _health(self) -> Response:
        stats = self._router.stats()
        told = {
            "targets": len(stats.targets),
            "in_flight": sum(target.in_flight for target in stats.targets.values()),
            "waiting": sum(target.waiting for target in stats.targets.values()),
        }
        return Response(200, b"Content-Type: application/json\r\n", json.dumps(told).encode())


def _split(url: bytes) -> tuple[str, bytes, bytes]:
    """The target's name, the upstream's path, and the query with its '?'."""
    path, mark, query = url.partition(b"?")
    if not path.startswith(PREFIX):
        raise Refused(404, "no_route", "there is nothing here", hint="use /lanes/{target}/v1/... or /generate")
    name, slash, rest = path[len(PREFIX) :].partition(b"/")
    if b"%" in name:
        name = unquote_to_bytes(name)
    return name.decode("utf-8", "replace"), slash + rest, mark + query


def _check_route(method: bytes, path: bytes) -> None:
    allowed = ROUTES.get(path)
    if allowed is None:
        raise Refused(404, "no_route", "the proxy passes no such route on", hint="it passes on what generates, only")
    if allowed != method:
        raise Refused(405, "method", f"this route takes {allowed.decode()}", headers={"Allow": allowed.decode()})
