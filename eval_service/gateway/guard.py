"""Who may ask at all: the first thing that a request meets, before its route, its body or its parameters are looked at.

Invariants: without its token nothing is told of runs, points, engines or even of which routes there are; a token is in
no message; a good token is never held up by what others send. Where there are no tokens the service listens on loopback
alone (`serve/settings.py`), and a page that a browser has open must not reach it: neither under a name that leads to
loopback, nor by a request to another site.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eval_service.access.config import Scope as Reach
from eval_service.access.hosts import as_address, is_loopback
from eval_service.access.keyring import Access, Token
from eval_service.access.needs import needed
from eval_service.access.rates import Rates
from eval_service.contract.errors import EvalfleetError, Forbidden, InvalidRequest, RateLimited, Unauthorized
from eval_service.gateway.envelopes import NO_SNIFFING, refusal

WRONG_PER_S = 5.0  # wrong tokens of one address
_HINT = "send `Authorization: Bearer TOKEN`; our clients take it from EVALFLEET_TOKEN"


class Guard:
    """Refuses, or passes on."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access
        self._rates = Rates(access.requests_per_s)
        self._wrong = Rates(WRONG_PER_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See that the request may be made; an answer says that its type is what it says."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._admit(scope)
        except EvalfleetError as exc:
            await refusal(exc)(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                held = {name for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in NO_SNIFFING.items()]
                message["headers"] = [*message["headers"], *(line for line in more if line[0] not in held)]
            await send(message)

        await self._app(scope, receive, sending)

    def _admit(self, scope: Scope) -> None:
        headers, peer = Headers(scope=scope), _peer(scope)
        need = needed(scope["method"], scope["path"])
        if need is None:
            self._count(f"address {peer}")
            return
        token = self._token(headers, peer) if self._access.keyring else None
        if token is not None:
            if not token.scope.reaches(need):
                raise Forbidden(f"the token {token.name!r} may {token.scope}; this needs {need}", hint="use another")
        elif self._access.keyring and not (self._access.public_read and need is Reach.READ):
            raise Unauthorized("this needs a token", hint=_HINT)
        else:
            self._check_browser(headers, reads=need is Reach.READ)
        self._count(f"token {token.name}" if token is not None else f"address {peer}")
        if "\0" in scope["path"] or b"%00" in scope["query_string"]:
            raise InvalidRequest("a NUL is in the address", hint="leave it out: no name holds one")

    def _token(self, headers: Headers, peer: str) -> Token | None:
        """Whose request it is; None where it brings none."""
        brought = headers.getlist("authorization")
        if not brought:
            return None
        scheme, _, presented = brought[0].partition(" ")
        if len(brought) == 1 and scheme.lower() == "bearer":
            token = self._access.keyring.holder(presented.strip().encode("latin-1"))
            if token is not None:
                return token
        if self._wrong.take(peer):
            raise RateLimited("too many wrong tokens from this address")
        raise Unauthorized("the service does not know this token", hint=_HINT)

    def _check_browser(self, headers: Headers, *, reads: bool) -> None:
        """Of what comes without a token: a page of another site, open in somebody's browser, must not get through."""
        name = _host(headers.get("host", ""))
        if self._access.local and name and not is_loopback(name):
            raise Forbidden(
                f"the service is not known as {name[:100]!r}", field="host", hint="use 127.0.0.1, or set tokens"
            )
        origin = headers.get("origin")
        if not reads and origin is not None and _place(origin) != headers.get("host"):
            raise Forbidden("another site's page may not do this", field="origin")

    def _count(self, name: str) -> None:
        if self._rates.take(name):
            raise RateLimited(
                f"more than {self._access.requests_per_s:g} requests a second", hint="ask again after 1 s"
            )


def _host(value: str) -> str:
    """The name in a Host header, without its port."""
    name, colon, port = value.rpartition(":")
    return value if not colon or not port.isdigit() or (":" in name and as_address(value) is not None) else name


def _place(origin: str) -> str:
    """The host of an Origin header; nothing where it is no URL."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _peer(scope: Scope) -> str:
    return str(scope["client"][0]) if scope.get("client") else "unknown"
