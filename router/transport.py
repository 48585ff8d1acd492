"""One run of a request on one upstream, over one pooled aiohttp session.

The connector never limits (the gate does, in front of it). An answer is whole or it is a fault: aiohttp raises for a
body shorter than its length or without its last chunk, and a body with neither is refused. When the caller's task is
cancelled the connection is closed, which is how an upstream learns that nobody waits any longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from router.upstream import Upstream

# Shorter than any server's (uvicorn: 5 s), so that a request never meets a connection that is being closed.
_KEEPALIVE_S = 2.0
_BODYLESS = frozenset({204, 304})


@dataclass(frozen=True, slots=True)
class Reply:
    """What one upstream answered."""

    status: int
    body: bytes


class Transport:
    """The session and its connections. Made inside a running event loop, closed once."""

    def __init__(self, connect_timeout_s: float) -> None:
        # No total: each run has a deadline of its own around it.
        self._timeout = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=connect_timeout_s)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def post(self, upstream: Upstream, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Send once and read the whole answer.

        Raises:
            one of router.faults.TRANSPORT_ERRORS.
        """
        url = upstream.url_of(path)
        sent = {**headers, **upstream.headers}
        async with self._session.post(url, data=body, headers=sent, allow_redirects=False) as response:
            whole = await response.read()
            if not _is_framed(response):
                raise aiohttp.ClientPayloadError("an answer with neither Content-Length nor chunks may be cut short")
            return Reply(response.status, whole)

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()


def _is_framed(response: aiohttp.ClientResponse) -> bool:
    chunked = "chunked" in response.headers.get("Transfer-Encoding", "").lower()
    return chunked or "Content-Length" in response.headers or response.status in _BODYLESS
