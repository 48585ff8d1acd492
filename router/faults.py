"""What can go wrong with one run of a request on one upstream, and the one place that maps foreign errors to it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import httptools


class FaultKind(StrEnum):
    """Why a run gave no answer that may be passed on."""

    CONNECT = "connect"  # no connection came about
    DISCONNECTED = "disconnected"  # the upstream hung up, or its connection broke
    BODY = "body"  # the answer's body was cut short, or nothing would tell if it were
    PROTOCOL = "protocol"  # what came is not HTTP, or more of it than an answer's head may have
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


@dataclass(frozen=True, slots=True)
class Broken:
    """Why one exchange gave no answer: the fault, but for whose it is."""

    kind: FaultKind
    detail: str


# What making a connection may raise that is the upstream's fault. Anything else is ours, and is not caught.
CONNECT_ERRORS = (OSError,)  # ssl.SSLError, socket.gaierror and TimeoutError are


def broken_of(error: BaseException | None, *, in_body: bool = False) -> Broken:
    """Map how a connection ended (None: it was closed) while an answer was due."""
    detail = f"{type(error).__name__}: {error}".rstrip(": ") if error else "it hung up before the answer was whole"
    if isinstance(error, httptools.HttpParserError | httptools.HttpParserUpgrade):
        return Broken(FaultKind.PROTOCOL, detail)
    return Broken(FaultKind.BODY if in_body else FaultKind.DISCONNECTED, detail)
