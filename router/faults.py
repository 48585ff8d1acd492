"""What can go wrong with one run of a request on one upstream, and the one place that maps aiohttp's errors to it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import aiohttp


class FaultKind(StrEnum):
    """Why a run gave no answer that may be passed on."""

    CONNECT = "connect"  # no connection came about
    DISCONNECTED = "disconnected"  # the upstream hung up, or its connection broke
    BODY = "body"  # the answer's body was cut short, or nothing would tell if it were
    PROTOCOL = "protocol"  # what came is not HTTP
    TIMEOUT = "timeout"  # a timeout of ours passed
    STATUS = "status"  # it answered 5xx


@dataclass(frozen=True, slots=True)
class Fault:
    """One failed run."""

    upstream: str
    kind: FaultKind
    detail: str

    def __str__(self) -> str:
        return f"{self.upstream} {self.kind} ({self.detail})"


# What a run may raise that is the upstream's fault. Anything else is ours, or the caller's, and is not caught.
TRANSPORT_ERRORS = (aiohttp.ClientError, TimeoutError, OSError)

# In order: a class stands before its bases.
_KINDS: tuple[tuple[type[BaseException], FaultKind], ...] = (
    (aiohttp.ConnectionTimeoutError, FaultKind.CONNECT),
    (TimeoutError, FaultKind.TIMEOUT),
    (aiohttp.ClientConnectorError, FaultKind.CONNECT),
    (aiohttp.ServerFingerprintMismatch, FaultKind.CONNECT),
    (aiohttp.ClientConnectionError, FaultKind.DISCONNECTED),
    (aiohttp.ClientPayloadError, FaultKind.BODY),
    (aiohttp.ClientError, FaultKind.PROTOCOL),
    (OSError, FaultKind.DISCONNECTED),
)


def fault_of(upstream: str, error: BaseException) -> Fault:
    """Map one of `TRANSPORT_ERRORS` to a fault."""
    kind = next(kind for cls, kind in _KINDS if isinstance(error, cls))
    return Fault(upstream, kind, f"{type(error).__name__}: {error}".rstrip(": "))
