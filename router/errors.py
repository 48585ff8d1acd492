"""The router's error tree; each has a code and the HTTP status that a proxy would answer.

RouterError
├── NoTarget         404  no such target, or it was dropped
├── NoUpstream       503  the target had no healthy upstream until the wait ended
├── QueueFull        429  the target's waiting room is full
├── WaitTimeout      504  upstreams are there, none had room until the wait ended
└── UpstreamFailed   502  every run that was allowed met a fault; `faults` says which
    ├── DeadlinePassed   504  the caller's deadline came while an upstream was at work
    └── CutShort         502  the answer broke off after some of it had been passed on
"""

from __future__ import annotations

from collections.abc import Sequence

from router.faults import Fault


class RouterError(Exception):
    """The base: the message says what happened, to which target."""

    code = "router"
    status = 500


class NoTarget(RouterError):
    """There is no such target, or it was dropped."""

    code = "no_target"
    status = 404


class NoUpstream(RouterError):
    """The target had no healthy upstream until the wait ended."""

    code = "no_upstream"
    status = 503


class QueueFull(RouterError):
    """The target's waiting room is full."""

    code = "queue_full"
    status = 429


class WaitTimeout(RouterError):
    """Upstreams are there, none had room until the wait ended."""

    code = "wait_timeout"
    status = 504


class UpstreamFailed(RouterError):
    """Every run that was allowed met a fault."""

    code = "upstream_failed"
    status = 502

    def __init__(self, message: str, faults: Sequence[Fault] = ()) -> None:
        told = "; ".join(str(fault) for fault in faults)
        super().__init__(f"{message}: {told}" if told else message)
        self.faults = tuple(faults)


class DeadlinePassed(UpstreamFailed):
    """The caller's deadline came while an upstream was at work."""

    code = "deadline_passed"
    status = 504


class CutShort(UpstreamFailed):
    """The answer broke off after some of it had been passed on: it can't be run again, and must not look whole."""

    code = "cut_short"
