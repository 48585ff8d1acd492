"""Follows the ledger's events for one tracker, webhook or the traces, in a thread of its own.

Invariants: what can't be told of one run hinders no other run for longer than one delivery's deadline in each of its
tries; nothing that a receiver does is felt by the controller, the gateways or another receiver.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from eval_service.contract.errors import EvalfleetError
from eval_service.ledger.changes import Changes
from eval_service.ledger.deliveries import Deliveries, Failed, Told
from eval_service.ledger.events import Event
from eval_service.ledger.views import Views
from eval_service.trackers.config import Target, TrackerConfig
from eval_service.trackers.items import Items
from eval_service.trackers.told import Item

log = logging.getLogger(__name__)
LOOK_S = 0.5
NOTE_S = 30.0  # how far behind a cursor may be that passed only what is of no concern
MOST_TIMEOUTS = 10  # that one delivery of many items may take
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Report:
    """What became of items: those that are neither done nor refused failed, for the reason in `error`."""

    done: frozenset[str]
    refused: frozenset[str] = frozenset()
    error: str = ""


class Receiver(Protocol):
    """Where items go."""

    def deliver(self, items: Sequence[Item]) -> Report:
        """Tell it of some items of one run; returns in bounded time, and raises nothing."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class Courier:
    """Tells one receiver what it is to be told. Call `step` by hand, or `start` its thread."""

    def __init__(
        self,
        name: str,
        target: Target,
        deliveries: Deliveries,
        receiver: Receiver,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._target = target
        self._deliveries = deliveries
        self._items = Items(Views(deliveries.database, version=""), target)
        self._receiver = receiver
        self._changes = Changes(deliveries.database)
        self._clock = clock
        self._position: int | None = None
        self._noted_at = float("-inf")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"courier-{name}", daemon=True)
        self.beat = clock()

    def start(self) -> None:
        """Follow the events until `close`."""
        self._thread.start()

    def close(self) -> None:
        """Stop; what is under way is ended, and told again by the next one."""
        self._stop.set()
        self._receiver.close()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        self._changes.close()

    def alive(self) -> bool:
        """Whether it makes progress."""
        return self._thread.is_alive() and self._clock() - self.beat < MOST_TIMEOUTS * self._target.timeout_s + 60.0

    def step(self) -> bool:
        """One look at the events and at what is late; whether there is more to do at once."""
        if self._position is None:
            # A curve has a beginning; who is told of news does not want those of last week.
            from_start = isinstance(self._target, TrackerConfig)
            self._position = self._deliveries.begin(self.name, from_start=from_start)
        late, page = self._deliveries.due(self.name), self._deliveries.after(self._position)
        waiting = self._deliveries.backing_off(self.name) if page else frozenset()
        told = self._tell([*late, *page], waiting, {event.seq for event in late})
        position = page[-1].seq if page else self._position
        if told.delivered or told.failed or (page and self._clock() - self._noted_at > NOTE_S):
            self._deliveries.note(self.name, Told(position, told.delivered, told.failed, told.refused))
            self._noted_at = self._clock()
        self._position = position
        return bool(page)

    # --- how

    def _tell(self, found: Sequence[Event], waiting: frozenset[str], late: set[int]) -> Told:
        by_run: dict[str, list[tuple[Event, list[Item]]]] = defaultdict(list)
        failed: list[Failed] = []
        delivered: list[int] = []
        refused = 0
        for event in found:
            if items := self._items.of(event):
                by_run[event.run or ""].append((event, items))
            elif event.seq in late:
                delivered.append(event.seq)  # it is of no concern any more
        for run, group in by_run.items():
            self.beat = self._clock()
            if self._stop.is_set() or run in waiting:
                failed += [Failed(event, "", tried=False) for event, _ in group]
                continue
            report = self._receiver.deliver([item for _, items in group for item in items])
            if report.error:
                log.warning("%s: run %s: %s; it is tried again", self.name, run, report.error)
            refused += len(report.refused)
            for event, items in group:
                if all(item["id"] in report.done | report.refused for item in items):
                    delivered.append(event.seq)
                else:
                    failed.append(Failed(event, report.error or "no answer"))
        return Told(0, delivered, failed, refused)

    def _run(self) -> None:
        number: int | None = None
        looked = float("-inf")
        while not self._stop.is_set():
            self.beat = self._clock()
            try:
                found = self._changes()
                # What is late comes due without a change.
                if found != number or self._clock() - looked >= 2.0:
                    number, looked = found, self._clock()
                    while self.step() and not self._stop.is_set():
                        self.beat = self._clock()
            except EvalfleetError as exc:
                log.warning("%s: %s", self.name, exc)
                self._position = None  # the ledger may be another one when it is back
            except Exception:
                log.exception("%s: it goes on", self.name)
            self._stop.wait(LOOK_S)
