"""Which free engine goes to which point: a pure function, so that its promises can be tested without a fleet.

Order: points that have waited too long; then priority; then fair share (the run with the fewest engines, of those the
one that got one longest ago); then, within a run, forced points and step order. A running lane that has use for one
more engine stands in the same order as a queued point. One engine is given at a time, so that every gift counts for
the next.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from eval_service.ledger.moves import Runnable


@dataclass(frozen=True, slots=True)
class Claim:
    """A point that has use for engines.

    `engines` are those leased to it already, `wants` how many more its unsent work is worth. `refused` are engines that
    it can't have (they failed its pin). `waited_s` counts while it has no engine.
    """

    point: Runnable
    wants: int
    engines: int = 0
    refused: frozenset[str] = frozenset()
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Lease:
    """Give an engine to a point: a running lane's, or a queued one whose lane starts with it."""

    engine: str
    point: str


@dataclass(frozen=True, slots=True)
class Shares:
    """What runs have and had: engines now, and the sequence number of the last lease."""

    held: Mapping[str, int]
    served: Mapping[str, int]


def plan(claims: Sequence[Claim], free: Sequence[str], shares: Shares, *, patience_s: float) -> list[Lease]:
    """Lease the free engines.

    Args:
        claims: one a point, queued or running.
        free: ids of engines nobody has.
        shares: of every run; one that is not in it has and had nothing.
        patience_s: a point without an engine for so long goes first, a forced one after half of it.
    """
    held, served = dict(shares.held), dict(shares.served)
    newest = max(served.values(), default=0)
    open_claims = {claim.point.id: claim for claim in claims if claim.wants > 0}
    left = list(free)
    leases: list[Lease] = []
    while left:
        able = [claim for claim in open_claims.values() if _quota_left(claim, held) and _choice(claim, left)]
        if not able:
            break
        claim = min(able, key=lambda claim: _order(claim, held, served, patience_s))
        engine = _choice(claim, left)
        assert engine is not None
        left.remove(engine)
        leases.append(Lease(engine, claim.point.id))
        newest += 1
        held[claim.point.run] = held.get(claim.point.run, 0) + 1
        served[claim.point.run] = newest
        open_claims[claim.point.id] = replace(claim, wants=claim.wants - 1, engines=claim.engines + 1)
        if claim.wants == 1:
            del open_claims[claim.point.id]
    return leases


def _choice(claim: Claim, left: Sequence[str]) -> str | None:
    return next((engine for engine in left if engine not in claim.refused), None)


def _order(
    claim: Claim, held: Mapping[str, int], served: Mapping[str, int], patience_s: float
) -> tuple[float | bool, ...]:
    point = claim.point
    patience_s = patience_s / 2 if point.force else patience_s
    if not claim.engines and claim.waited_s >= patience_s:
        return (0, not point.force, -claim.waited_s, point.seq)
    share = (held.get(point.run, 0), served.get(point.run, -1))
    return (1, -point.priority, *share, not point.force, point.step, point.seq)


def _quota_left(claim: Claim, held: Mapping[str, int]) -> int:
    quota = sys.maxsize if claim.point.max_engines is None else claim.point.max_engines
    return max(0, quota - held.get(claim.point.run, 0))
