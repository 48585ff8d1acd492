"""The watch itself: look, take what is complete, and know at any time what is covered.

A restart repeats nothing: what the ledger has of a directory that has not changed since is left alone, and what is
dispatched goes under a reservation that is a function of its content, so the same again is the same points.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eval_service.contract.client import EvalClient
from eval_service.contract.errors import Busy, EvalfleetError, InvalidRequest, NotFound, Unavailable
from eval_service.contract.states import ENDS, PointState
from eval_service.contract.wire import DispatchRequest, Kind, PointView, RunSpec, Source
from eval_service.watch.completion import Checkpoint, Incomplete, Rule
from eval_service.watch.steps import Steps, step_of

_NAMESPACE = uuid.UUID("6c0b6d0e-7f0a-5b1e-9d53-1f6f4a0c8b77")
PAGE = 200


@dataclass(frozen=True, slots=True)
class Asked:
    """What is watched, and as which run.

    `model` is where in each step's directory the model lies; `keys` change the run's spec, or make it.
    """

    directory: Path
    run: str
    rule: Rule = field(default_factory=Rule)
    steps: Steps = field(default_factory=Steps)
    pattern: re.Pattern[str] | None = None
    model: str = "."
    root: Path | None = None
    suites: tuple[str, ...] = ()
    max_in_flight: int | None = None


@dataclass(slots=True)
class Taken:
    """One step's directory. `why` says what it waits for; `blocked`: it waits for nothing that would come by itself."""

    checkpoint: Checkpoint
    why: str = "not looked at yet"
    blocked: bool = False
    sent: str | None = None  # the mark of what was handed over


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the coverage: a step and suite, and what became of it."""

    step: int
    suite: str | None
    directory: str | None
    state: str
    why: str | None = None
    score: float | None = None

    @property
    def done(self) -> bool:
        """It is on the curve."""
        return self.state == PointState.DONE


@dataclass(slots=True)
class Watcher:
    """Turn by turn; the caller waits in between."""

    asked: Asked
    client: EvalClient
    now: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    say: Callable[[str], None] = lambda _: None
    taken: dict[int, Taken] = field(default_factory=dict)
    doubles: dict[int, str] = field(default_factory=dict)
    points: list[PointView] = field(default_factory=list)
    in_flight: set[str] = field(default_factory=set)
    spec: RunSpec | None = None
    last_spec: RunSpec | None = None  # told again to a service that has lost its ledger
    told: int = -1

    def turn(self) -> None:
        """Look once and hand over what is complete, lowest step first.

        Raises:
            Unavailable: the service is away; the next turn goes on.
            InvalidRequest: the service refuses the run.
            OSError: the directory can't be read.
        """
        self._find()
        try:
            self._hand_over()
        except NotFound as exc:  # it has lost its ledger: the next turn tells it everything again
            self.spec, self.told = None, -1
            raise Unavailable(exc.message) from exc

    def _hand_over(self) -> None:
        if self.spec is None:
            self._announce()
        self._tell_progress()
        self.points = self._all_points()
        self.in_flight = {point.snapshot or point.reservation for point in self.points if point.state not in ENDS}
        for step in sorted(self.taken):
            if not self._take(step, self.taken[step]):
                break
        self.points = self._all_points()

    @property
    def suites(self) -> tuple[str, ...]:
        """The run's."""
        return self.last_spec.suites if self.last_spec is not None else ()

    @property
    def bound(self) -> int:
        """How many checkpoints may be handed over and not ended."""
        return self.last_spec.max_in_flight if self.last_spec is not None else 1

    @property
    def at_rest(self) -> bool:
        """Everything that was seen has ended, or will not come by itself."""
        return all(
            taken.blocked or (taken.sent is not None and self._ended(step)) for step, taken in self.taken.items()
        )

    @property
    def complete(self) -> bool:
        """Every step that was named has ended; never, where the steps have no end."""
        steps = self.asked.steps
        return steps.closed and all(
            step in self.taken and self.taken[step].sent is not None and self._ended(step) for step in steps.expected
        )

    def coverage(self) -> list[Row]:
        """What was expected, and what became of it, by step."""
        rows: list[Row] = []
        for step in sorted(self.asked.steps.expected | set(self.taken) | set(self.doubles)):
            rows += self._rows(step)
        return rows

    # --- looking

    def _find(self) -> None:
        found: dict[int, list[Path]] = {}
        for path in sorted(self.asked.directory.iterdir()):
            step = step_of(path.name, self.asked.pattern)
            if step is not None and step in self.asked.steps and path.name != self.asked.run and path.is_dir():
                found.setdefault(step, []).append(path)
        self.doubles = {step: _listed(paths) for step, paths in found.items() if len(paths) > 1}
        for step in self.doubles:
            self.taken.pop(step, None)
        for step, paths in found.items():
            place = paths[0] / self.asked.model
            if len(paths) == 1 and (step not in self.taken or self.taken[step].checkpoint.directory != place):
                self.taken[step] = Taken(Checkpoint(place, self.now, self.monotonic))

    def _take(self, step: int, taken: Taken) -> bool:
        """Hand it over if it is complete and not yet known; tells whether there may be room for another."""
        if self._is_known(step, taken):
            return True
        judged = taken.checkpoint.judge(self.asked.rule)
        if isinstance(judged, Incomplete):
            taken.why, taken.blocked, taken.sent = judged.why, judged.settled, None
            return True
        return self._send(step, taken, judged.digest, judged.mark)

    def _is_known(self, step: int, taken: Taken) -> bool:
        """Nothing has changed since it was handed over, by this watch or by an earlier one."""
        try:
            seen = taken.checkpoint.look()
        except OSError:  # it may be gone: its points go on, if it has any
            return taken.sent is not None
        if taken.sent == seen.mark:
            return True
        known = [point for point in self._of(step) if point.created_at > seen.changed_at]
        if taken.sent is None and {point.suite for point in known} >= set(self.suites):
            taken.sent, taken.why, taken.blocked = seen.mark, "", False
            return True
        return False

    # --- the service

    def _announce(self) -> None:
        asked = self.asked
        try:
            spec = self.client.run(asked.run).spec
        except NotFound:
            if self.last_spec is not None:
                spec = self.last_spec
            elif asked.suites:
                spec = RunSpec(root=str(asked.root or asked.directory), suites=asked.suites)
            else:
                hint = "name the suites, such as --suites letters"
                raise InvalidRequest(f"run {asked.run} is not known yet", field="suites", hint=hint) from None
        given: dict[str, object] = {"suites": asked.suites or None, "max_in_flight": asked.max_in_flight}
        given |= {"root": str(asked.root) if asked.root else None}
        spec = spec.model_copy(update={key: value for key, value in given.items() if value is not None})
        self.client.put_run(asked.run, spec)
        self.spec = self.last_spec = spec

    def _tell_progress(self) -> None:
        newest = max(self.taken, default=-1)
        if newest > self.told:
            self.client.progress(self.asked.run, newest)
            self.told = newest

    def _send(self, step: int, taken: Taken, digest: str | None, mark: str) -> bool:
        place = taken.checkpoint.directory.resolve()
        suites = self._lacking(step, place, digest)
        if not suites:
            taken.sent, taken.why, taken.blocked = mark, "", False
            return True
        if not self._has_room():
            taken.why, taken.blocked = f"waits for room: {self.bound} checkpoints are in flight", False
            return False
        content = "\0".join((self.asked.run, str(step), str(place), digest or mark, *suites))
        request = DispatchRequest(
            run=self.asked.run,
            step=step,
            suites=suites,
            kind=Kind.BASELINE if step == 0 else Kind.PERIODIC,
            reservation=str(uuid.uuid5(_NAMESPACE, content)),
            snapshot=str(place),
            digest=digest,
            source=Source.CALLER,
        )
        try:
            reply = self.client.dispatch(request)
        except Busy as exc:
            taken.why, taken.blocked = exc.message, False
            return False
        except (NotFound, Unavailable):
            raise
        except EvalfleetError as exc:
            taken.why, taken.blocked = str(exc), True
            return True
        taken.sent, taken.why, taken.blocked = mark, "", False
        self.in_flight.add(str(place))
        self.say(f"step {step}: {taken.checkpoint.directory.name} {reply.outcome}")
        return True

    def _has_room(self) -> bool:
        """Whether the run is below its bound: the service would hold the call until it is."""
        return len(self.in_flight) < self.bound

    def _lacking(self, step: int, place: Path, digest: str | None) -> tuple[str, ...]:
        same = {point.suite for point in self._of(step) if digest is not None and point.digest == digest}
        return tuple(suite for suite in self.suites if suite not in same)

    def _of(self, step: int) -> list[PointView]:
        """The ledger's points of a step's directory."""
        place = str(self.taken[step].checkpoint.directory.resolve())
        return [point for point in self.points if point.step == step and point.snapshot == place]

    def _all_points(self) -> list[PointView]:
        found: list[PointView] = []
        while True:
            page = self.client.points(run=self.asked.run, limit=PAGE, offset=len(found))
            found += page.points
            if len(found) >= page.total or not page.points:
                return [point for point in found if not point.superseded]

    # --- what became of it

    def _ended(self, step: int) -> bool:
        found = {point.suite: point for point in self.points if point.step == step}
        return all(suite in found and found[suite].state in ENDS for suite in self.suites)

    def _rows(self, step: int) -> list[Row]:
        if step in self.doubles:
            return [Row(step, None, None, "ambiguous", f"{self.doubles[step]} are both of this step; see --pattern")]
        if step not in self.taken:
            return [Row(step, None, None, "missing", "no directory of this step was seen")]
        taken = self.taken[step]
        name = taken.checkpoint.directory.relative_to(self.asked.directory).as_posix()
        if taken.sent is None:
            return [Row(step, None, name, "not taken", taken.why)]
        found = {point.suite: point for point in self.points if point.step == step}
        return [_row(step, suite, name, found.get(suite)) for suite in self.suites]


def gaps(rows: Iterable[Row]) -> list[str]:
    """Everything that is not on the curve, by name."""
    return [
        f"step {row.step}{f' {row.suite}' if row.suite else ''}: {row.state}{f' ({row.why})' if row.why else ''}"
        for row in rows
        if not row.done
    ]


def _row(step: int, suite: str, directory: str, point: PointView | None) -> Row:
    if point is None:
        return Row(step, suite, directory, "not taken", "the service has no such point")
    why = ": ".join(part for part in (point.reason, point.detail) if part) or None
    return Row(step, suite, directory, point.state, why, point.score)


def _listed(paths: Sequence[Path]) -> str:
    return " and ".join(path.name for path in paths)
