"""What an engine's replica and the controller say to each other, over a Serve handle (or a direct call in tests).

The replica polls: each `EngineReport` is answered at once with a command where there is one, else after a while. A
command carries the epoch of the controller that gave it; a replica refuses one lower than the highest it has seen.
Commands run one at a time; the result of a finished one travels in each report until a poll has delivered it. A
command is given again in each answer until a report says that it was taken, and runs once; so nothing that is lost on
either way of a poll matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeVar

from eval_service.contract.manifest import Manifest
from eval_service.contract.wire import EngineState

_T = TypeVar("_T")
POLL_S = 1.0  # how long a poll is held
IDLE_POLL_S = 3.0  # of an engine that is nobody's, at most: over Serve each one costs 3 ms of a core
REMEMBERED = 2  # snapshots that an engine was proven to hold: the one before tells of an engine that fails on the last


class CommandKind(StrEnum):
    """What a controller may ask of an engine."""

    PIN = "pin"  # prepare, quiesce, load, read back, verify
    RESTART = "restart"  # end the server and start it again on its boot model
    RECALL = "recall"  # tell what it was proven to hold: a new controller knows nothing of it
    LEAVE = "leave"  # there is no more work for it: a replica that wants to end may


class PinError(StrEnum):
    """Why a pin failed."""

    NOT_VISIBLE = "not_visible"  # the files did not reach their manifest's sizes on this node in time
    REFUSED = "refused"  # the engine answered with an error and kept what it had
    DIED = "died"  # the engine's server ended or stopped answering
    UNAVAILABLE = "unavailable"  # it answered 5xx: it could not do it, which says nothing of what was asked
    LABEL = "label"  # /model_info shows another weight_version
    CANARY = "canary"  # log-probs differ from the trainer's by more than the tolerance
    DISAGREES = "disagrees"  # its fingerprint is another than that of an engine with the same snapshot
    UNCHANGED = "unchanged"  # other weights were asked for, and the fingerprint stayed what it was
    STALE_EPOCH = "stale_epoch"  # the command is of a controller that no longer acts
    STORE = "store"  # the object store that it is in can't be read now
    TIMEOUT = "timeout"  # the deadline passed


@dataclass(frozen=True, slots=True)
class PinOrder:
    """Load `snapshot` and prove it.

    `roots` are the service's: a snapshot that has come to lie outside of them, or has a file that does, is not loaded.
    """

    snapshot: str
    manifest: Manifest
    weight_version: str
    timeout_s: float = 120.0
    visibility_timeout_s: float = 60.0
    roots: tuple[str, ...] = ("/",)


def remembered(held: Iterable[_T], order: Callable[[_T], PinOrder]) -> tuple[_T, ...]:
    """The first ones, each of other weights than those before it."""
    kept: dict[str, _T] = {}
    for one in held:
        kept.setdefault(order(one).manifest.tensor_digest, one)
    return tuple(kept.values())[:REMEMBERED]


@dataclass(frozen=True, slots=True)
class Command:
    """One thing to do."""

    id: str
    epoch: int
    kind: CommandKind
    pin: PinOrder | None = None


@dataclass(frozen=True, slots=True)
class PinEvidence:
    """What was seen of an engine after its pin.

    `fingerprint` is equal over engines that hold the same weights on the same kind of hardware; `canary_diff` is the
    mean absolute difference to the manifest's canary (nats), None where the manifest has none.
    """

    weight_version: str
    fingerprint: str
    fingerprint_kind: str  # "checksum" (CUDA's parameter checksums) or "logprobs" (the engine's own canary)
    canary_diff: float | None
    prepare_s: float
    load_s: float
    verify_s: float


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended; `recalled` is what canaries proved the engine to hold, of different weights, last first."""

    id: str
    ok: bool
    error: PinError | None = None
    detail: str | None = None
    evidence: PinEvidence | None = None
    recalled: tuple[PinOrder, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What a replica tells of itself in each poll.

    A new `nonce` means that the server was started anew: whatever was pinned is gone. `number` grows with each report,
    so that one that was overtaken on its way is known for what it is. `recalls`: it was proven, by a canary, to hold
    something, and can tell what.
    """

    engine: str
    group: str
    node: str
    state: EngineState
    replica_pid: int
    nonce: str | None = None
    detail: str | None = None
    url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    server_pid: int | None = None
    supervisor_pid: int | None = None
    vocab_size: int | None = None
    context_length: int | None = None
    weight_version: str | None = None
    restarts: int = 0
    recalls: bool = False
    number: int = 0
    taken: tuple[str, ...] = ()  # ids of commands that wait or run
    results: tuple[CommandResult, ...] = ()


class ControllerLink(Protocol):
    """How a replica reaches the controller."""

    async def poll(self, report: EngineReport) -> Command | None:
        """Deliver a report, wait up to `IDLE_POLL_S` for a command.

        Raises:
            Unavailable: no controller acts now; the replica goes on and polls again.
        """
        ...
