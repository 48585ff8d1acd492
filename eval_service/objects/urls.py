"""Names in an object store: `protocol://place/...`. They are judged as they are written; nothing is asked of the store.

Only plain segments are taken: nothing that could be a pattern, a query, a chain of protocols or a credential.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from eval_service.contract.errors import InvalidRequest

_PROTOCOL = re.compile(r"[a-z][a-z0-9+.-]*")
_SEGMENT = re.compile(r"[A-Za-z0-9._=+,~-]+")
_MAX_CHARS = 1024


def is_url(path: str) -> bool:
    """Whether a snapshot is named by URL rather than by the path of a directory."""
    return "://" in path


def protocol_of(url: str) -> str:
    """What comes before `://`."""
    return url.partition("://")[0]


def check_url(url: str, field: str) -> str:
    """The URL without a slash at its end.

    Raises:
        InvalidRequest: it is no plain `protocol://place/...`.
    """
    protocol, _, rest = url.rstrip("/").partition("://")
    segments = rest.removeprefix("/").split("/")  # file:///data/...
    plain = all(_SEGMENT.fullmatch(segment) and segment not in (".", "..") for segment in segments)
    if not (_PROTOCOL.fullmatch(protocol) and plain and len(url) <= _MAX_CHARS):
        raise InvalidRequest(
            f"{url[:_MAX_CHARS]!r} is no plain URL of a snapshot",
            field=field,
            hint="protocol://place/..., of letters, digits and . _ = + , ~ - between the slashes; no query, no key",
        )
    return f"{protocol}://{rest}"


def check_admitted(url: str, prefixes: Iterable[str], field: str) -> str:
    """The URL, if it lies under one of the prefixes.

    Raises:
        InvalidRequest: it does not, or is no plain URL.
    """
    url = check_url(url, field)
    prefixes = tuple(prefixes)
    if not any(lies_under(url, prefix) for prefix in prefixes):
        there = f"there are: {', '.join(prefixes)}" if prefixes else "there are none"
        raise InvalidRequest(
            f"{url} lies under none of the service's object prefixes",
            field=field,
            hint=f"name its prefix in objects.prefixes in fleet.toml; {there}",
        )
    return url


def lies_under(url: str, prefix: str) -> bool:
    """Whether a URL lies in what a prefix names."""
    return url.startswith(prefix.rstrip("/") + "/")


def join(url: str, name: str) -> str:
    """The name of something in what a URL names."""
    return f"{url.rstrip('/')}/{name}"


def last_of(url: str) -> str:
    """The last segment."""
    return url.rstrip("/").rpartition("/")[2]


def parent_of(url: str) -> str:
    """The URL without its last segment."""
    return url.rstrip("/").rpartition("/")[0]
