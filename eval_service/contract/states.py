"""The life of a point as data: states, the transitions between them, and the closed list of reasons."""

from __future__ import annotations

from enum import StrEnum


class PointState(StrEnum):
    """Where a point is in its life."""

    RESERVED = "reserved"  # room is granted; the snapshot is still to come
    QUEUED = "queued"  # its snapshot is named; it waits for the admission checks or for engines
    PINNING = "pinning"  # engines are leased and load the snapshot
    RUNNING = "running"  # samples are being generated
    SCORING = "scoring"  # all samples are in; scores and metrics are made
    DONE = "done"  # its result is recorded
    SKIPPED = "skipped"  # it was never generated
    FAILED = "failed"  # it was tried
    CANCELLED = "cancelled"  # somebody took it back


class Reason(StrEnum):
    """Why a point ended without a result."""

    BUSY = "busy"
    EXPORT_FAILED = "export_failed"
    RESERVATION_EXPIRED = "reservation_expired"
    CKPT_MISSING = "ckpt_missing"
    SNAPSHOT_INVALID = "snapshot_invalid"
    PIN_VIOLATION = "pin_violation"
    UNHEALTHY = "unhealthy"
    EVAL_SKIP = "eval_skip"

    MAX_ATTEMPTS = "max_attempts"
    DEADLINE = "deadline"
    ERROR_RATE = "error_rate"
    CRASHED = "crashed"

    USER = "user"
    SUPERSEDED = "superseded"
    DRAIN_TIMEOUT = "drain_timeout"
    RUN_DELETED = "run_deleted"


class PinProof(StrEnum):
    """How it is known that the engines held the point's weights."""

    CANARY = "canary"  # the trainer's own log-probs were reproduced
    CHECKSUM = "checksum"  # the parameter checksums agree over the lane, and changed when the content did
    AGREEMENT = "agreement"  # the engines' own log-probs agree over the lane, and changed when the content did
    UNPROVEN = "unproven"  # the label says so, nothing else does


ENDS = frozenset({PointState.DONE, PointState.SKIPPED, PointState.FAILED, PointState.CANCELLED})
LIVE = frozenset({PointState.PINNING, PointState.RUNNING, PointState.SCORING})

REASONS: dict[PointState, frozenset[Reason]] = {
    PointState.SKIPPED: frozenset(
        {
            Reason.BUSY,
            Reason.EXPORT_FAILED,
            Reason.RESERVATION_EXPIRED,
            Reason.CKPT_MISSING,
            Reason.SNAPSHOT_INVALID,
            Reason.PIN_VIOLATION,
            Reason.UNHEALTHY,
            Reason.EVAL_SKIP,
        }
    ),
    PointState.FAILED: frozenset({Reason.MAX_ATTEMPTS, Reason.DEADLINE, Reason.ERROR_RATE, Reason.CRASHED}),
    PointState.CANCELLED: frozenset({Reason.USER, Reason.SUPERSEDED, Reason.DRAIN_TIMEOUT, Reason.RUN_DELETED}),
}

_S = PointState
# From a state to those that may follow it. An end is left by `retry` alone, and `done` never.
TRANSITIONS: dict[PointState, frozenset[PointState]] = {
    _S.RESERVED: frozenset({_S.QUEUED, _S.SKIPPED, _S.CANCELLED}),
    _S.QUEUED: frozenset({_S.PINNING, _S.SKIPPED, _S.FAILED, _S.CANCELLED}),
    _S.PINNING: frozenset({_S.RUNNING, _S.QUEUED, _S.SKIPPED, _S.FAILED, _S.CANCELLED}),
    _S.RUNNING: frozenset({_S.SCORING, _S.QUEUED, _S.SKIPPED, _S.FAILED, _S.CANCELLED}),
    _S.SCORING: frozenset({_S.DONE, _S.QUEUED, _S.SKIPPED, _S.FAILED, _S.CANCELLED}),
    _S.DONE: frozenset(),
    _S.SKIPPED: frozenset({_S.QUEUED}),
    _S.FAILED: frozenset({_S.QUEUED}),
    _S.CANCELLED: frozenset({_S.QUEUED}),
}


def check_transition(old: PointState, new: PointState, reason: Reason | None) -> None:
    """Refuse a move that the table has not, or an end whose reason is not of its list.

    Raises:
        ValueError: our own mistake, never a user's.
    """
    if new not in TRANSITIONS[old]:
        raise ValueError(f"no way from {old} to {new}")
    allowed = REASONS.get(new)
    if (allowed is None) != (reason is None) or (allowed is not None and reason not in allowed):
        raise ValueError(f"{reason} is no reason for {new}")
