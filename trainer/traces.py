"""What is already there of a step's points: in the ledger, and published but never handed over.

A launch that was killed anywhere between a reservation and its answer leaves one of these; the next launch goes on with
it and makes no second point.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from eval_service.contract import names
from eval_service.contract.client import EvalClient
from eval_service.contract.errors import NotFound, Unavailable
from eval_service.contract.states import ENDS, PointState
from eval_service.contract.wire import DispatchRequest, PointView

_REQUESTS = TypeAdapter(tuple[DispatchRequest, ...])


@dataclass(frozen=True, slots=True)
class Traces:
    """Of one step. `ledger` is None where the service did not answer."""

    ledger: tuple[PointView, ...] | None
    published: tuple[DispatchRequest, ...]

    @property
    def has_snapshots(self) -> bool:
        """Some snapshot of this step was published before."""
        return bool(self.published) or any(point.snapshot is not None for point in self._counting())

    def covered(self, *, digest: str | None = None, snapshot: str | None = None) -> set[str]:
        """Suites that are done or under way on this very content (or at all, with neither given)."""
        return {
            point.suite
            for point in self._counting()
            if point.state is not PointState.RESERVED
            and (digest is None or point.digest == digest)
            and (snapshot is None or point.snapshot == snapshot)
        }

    def reserved(self, suites: Iterable[str]) -> str | None:
        """A reservation that holds room for all of `suites` and still waits for its snapshot."""
        by_uuid: dict[str, set[str]] = {}
        for point in self._counting():
            if point.state is PointState.RESERVED:
                by_uuid.setdefault(point.reservation, set()).add(point.suite)
        return next((uuid for uuid, held in by_uuid.items() if held == set(suites)), None)

    def unsent(self, digest: str) -> DispatchRequest | None:
        """The request beside a published snapshot of this content."""
        known = {point.reservation for point in self.ledger or () if point.state is not PointState.RESERVED}
        of_content = (request for request in self.published if request.digest == digest)
        return next((request for request in of_content if request.reservation not in known), None)

    def _counting(self) -> list[PointView]:
        ended_badly = ENDS - {PointState.DONE}
        return [point for point in self.ledger or () if not point.superseded and point.state not in ended_badly]


def find_traces(client: EvalClient | None, root: Path, run: str, step: int) -> Traces:
    """Ask the ledger (no client: it is away), and look into the run's directory."""
    try:
        ledger = client.points(run=run, step=step).points if client is not None else None
    except (Unavailable, NotFound):  # away, or it has lost its ledger and will be told of the run again
        ledger = None
    return Traces(ledger, tuple(_published(root, run, step)))


def _published(root: Path, run: str, step: int) -> Iterable[DispatchRequest]:
    for directory in sorted(names.run_dir(root, run).glob(f"step_{step}-*")):
        parsed = names.parse_step_dir(directory.name)
        if parsed is not None and parsed.step == step and (directory / names.COMPLETE).exists():
            yield from _read_requests(directory / names.DISPATCH)


def _read_requests(path: Path) -> tuple[DispatchRequest, ...]:
    try:
        return _REQUESTS.validate_python(json.loads(path.read_bytes()), strict=False)
    except (OSError, ValueError, ValidationError):
        return ()
