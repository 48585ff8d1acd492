"""The faults, and the list that a seed gives: a pure function, so the same seed is the same list on any machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from eval_service.contract.errors import ConfigError


class FaultKind(StrEnum):
    """What is done to the fleet."""

    KILL_CONTROLLER = "kill_controller"
    STOP_CONTROLLER = "stop_controller"
    LOSE_LOCK = "lose_lock"  # the lock file is removed under a stopped controller, which later goes on beside the next
    KILL_GATEWAY = "kill_gateway"
    STOP_GATEWAY = "stop_gateway"
    KILL_ENGINE = "kill_engine"
    STOP_ENGINE = "stop_engine"
    KILL_SUPERVISOR = "kill_supervisor"
    STOP_SUPERVISOR = "stop_supervisor"
    KILL_REPLICA = "kill_replica"
    STOP_REPLICA = "stop_replica"
    KILL_PROXY = "kill_proxy"
    STOP_PROXY = "stop_proxy"  # for longer than it may serve without being told that it may
    KILL_SERVICE = "kill_service"  # all of it, at once; then it is started again

    STALE_LABEL = "stale_label"
    WRONG_WEIGHTS = "wrong_weights"
    STALE_SAMPLES = "stale_samples"
    UNAVAILABLE = "unavailable"
    REFUSE_UPDATE = "refuse_update"
    DIE_ON_UPDATE = "die_on_update"
    SLOW_GENERATION = "slow_generation"
    HANG = "hang"

    SERVICE_DISK_FULL = "service_disk_full"  # the controller and the gateways can write no byte for a while

    TRAINER_DISK_FULL = "trainer_disk_full"
    LATE_FILES = "late_files"  # the weights are visible only some time after the dispatch
    DAMAGED_OUTBOX = "damaged_outbox"
    BAD_SNAPSHOT = "bad_snapshot"  # the admission checks must refuse it
    POISONED_SNAPSHOT = "poisoned_snapshot"  # sound to look at, and no engine can reproduce its canary
    KILL_TRAINER_UNSENT = "kill_trainer_unsent"  # between the rename and the POST
    KILL_TRAINER_EXPORTING = "kill_trainer_exporting"  # between two shards
    STOP_TRAINER = "stop_trainer"


_FIRST_OF_TRAINER = list(FaultKind).index(FaultKind.TRAINER_DISK_FULL)
BY_TRAINER = frozenset(list(FaultKind)[_FIRST_OF_TRAINER:])
"""Faults of one export, brought about by the simulated trainer itself; all others are done to the service."""

KNOBS = frozenset(
    {
        FaultKind.STALE_LABEL,
        FaultKind.WRONG_WEIGHTS,
        FaultKind.STALE_SAMPLES,
        FaultKind.UNAVAILABLE,
        FaultKind.REFUSE_UPDATE,
        FaultKind.DIE_ON_UPDATE,
        FaultKind.SLOW_GENERATION,
        FaultKind.HANG,
    }
)
"""Faults that a fake engine brings about when told to."""

SPOILS_PINS = frozenset(
    {
        FaultKind.KILL_ENGINE,
        FaultKind.STOP_ENGINE,
        FaultKind.KILL_SUPERVISOR,
        FaultKind.STOP_REPLICA,
        *(KNOBS - {FaultKind.STALE_SAMPLES}),
    }
)
"""Faults of which a pin may fail, so that they can make a sound snapshot look bad (chaos/sparing.py)."""

TWICE_LOOKS_BAD = frozenset({FaultKind.REFUSE_UPDATE, FaultKind.WRONG_WEIGHTS})
"""Of these two are enough, before and after the start that proves an engine; of the others it takes three."""

TO_THE_PROXY = frozenset({FaultKind.KILL_PROXY, FaultKind.STOP_PROXY})
"""Faults during which a served point may go unanswered for a while."""

CUTS_THE_API = frozenset(
    {
        FaultKind.KILL_GATEWAY,
        FaultKind.STOP_GATEWAY,
        FaultKind.KILL_SERVICE,
        FaultKind.SERVICE_DISK_FULL,
    }
)
"""Faults during which, and for a while after which, a dispatch may go unanswered."""

HOLDS_UP_WRITES = frozenset({FaultKind.STOP_CONTROLLER, FaultKind.LOSE_LOCK})
"""Faults during which a dispatch may go unanswered: who is stopped within a write holds up all others."""

CUTS_THE_CONTROLLER = frozenset(
    {
        FaultKind.KILL_CONTROLLER,
        FaultKind.STOP_CONTROLLER,
        FaultKind.LOSE_LOCK,
        FaultKind.KILL_SERVICE,
        FaultKind.SERVICE_DISK_FULL,
    }
)
"""Faults during which no controller may act for a while."""

_SERVE_REPLACES = frozenset({FaultKind.STOP_CONTROLLER, FaultKind.STOP_GATEWAY, FaultKind.STOP_REPLICA})

# Costs a minute of everybody's time, so it comes once in so many faults, and not in a short list.
_KILL_SERVICE_EVERY = 60
_LONG = 35  # as many faults are begun while Serve finds out that an engine's replica hangs, and replaces it
_LATE = 0.75  # in the last part of a list nothing is stopped until it is replaced: all would wait for that alone


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the list.

    Attributes:
        run: index of the run whose trainer it befalls.
        pick: in [0, 1), which of the possible victims it is.
        times: how often a knob bites before it is off again.
        hold_s: how long what is stopped stays stopped; None: until it is replaced.
        variant: in [0, 1), picks among the ways in which a kind can be done.
    """

    number: int
    kind: FaultKind
    run: int
    pick: float
    times: int
    hold_s: float | None
    variant: float


def plan_faults(seed: int, count: int, *, runs: int, kinds: Sequence[FaultKind] = ()) -> list[Fault]:
    """The list of a seed: every kind before any comes again, in an order of the seed's own.

    Args:
        count: how many faults.
        runs: how many runs there are.
        kinds: only these; empty: all.

    Raises:
        ConfigError: a count that is no count.
    """
    if count < 0:
        raise ConfigError(f"{count} is no number of faults", field="--faults", hint="use 0 or more")
    rng = random.Random(seed)
    order: list[FaultKind] = []
    while len(order) < count:
        deck = list(kinds or FaultKind)
        services = order.count(FaultKind.KILL_SERVICE)
        if not kinds and len(order) < (services + 1) * _KILL_SERVICE_EVERY:
            deck.remove(FaultKind.KILL_SERVICE)
        rng.shuffle(deck)
        order += deck[: count - len(order)]
    faults = [_fault(rng, number, kind, runs, late=number > _LATE * count) for number, kind in enumerate(order)]
    return [replace(fault, number=number) for number, fault in enumerate(_long_ones_early(rng, faults))]


def _long_ones_early(rng: random.Random, faults: list[Fault]) -> list[Fault]:
    """What would outlast the rest of the list changes places with one of its first part."""
    for place, fault in enumerate(faults):
        if fault.kind is FaultKind.STOP_REPLICA and fault.hold_s is None and place > len(faults) - _LONG:
            other = rng.randrange(place // 3 + 1)
            faults[place], faults[other] = faults[other], fault
    return faults


def _fault(rng: random.Random, number: int, kind: FaultKind, runs: int, *, late: bool) -> Fault:
    short = round(rng.uniform(0.5, 4.0), 2)
    replaced = rng.random() < 0.5 and kind in _SERVE_REPLACES and not late
    return Fault(
        number=number,
        kind=kind,
        run=rng.randrange(runs),
        pick=rng.random(),
        times=rng.randint(1, 3),
        hold_s=None if replaced else short,
        variant=rng.random(),
    )
