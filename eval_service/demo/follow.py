"""Follows a training run: a line for every point that ends, and the moment for the kill."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from eval_service.cli.output import plus_minus, text
from eval_service.cli.progress import Advance
from eval_service.cli.reading import all_points
from eval_service.contract.client import EvalClient
from eval_service.contract.errors import EvalfleetError, NotFound, Unavailable
from eval_service.contract.states import ENDS, PointState
from eval_service.contract.wire import PointView
from eval_service.demo import service
from eval_service.demo.kill import EngineKiller
from eval_service.demo.plan import RUN
from eval_service.demo.processes import Child, DemoError

LOOK_S = 0.2

Say = Callable[[str], None]


@dataclass(slots=True)
class Follower:
    """Looks at the run's points again and again; a look that fails is made up for by the next."""

    client: EvalClient
    say: Say
    killer: EngineKiller | None
    advance: Advance
    planned: int
    told: set[str] = field(default_factory=set)

    def follow(self, trainer: Child, alive: Child, *, timeout_s: float) -> None:
        """Follow until the trainer has ended, its own drain included.

        Raises:
            DemoError: trainer or service failed, or the time is up.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while not trainer.wait(LOOK_S):
                alive.must_run()
                self.look()
                if time.monotonic() > deadline:
                    raise DemoError(f"{trainer.name} has not ended after {timeout_s:.0f} s; it said:\n{trainer.tail()}")
            self.look()
        finally:
            if self.killer is not None:
                self.killer.let_go()
        if trainer.process.returncode != 0:
            trainer.must_run()

    def look(self) -> None:
        """Tell of what ended since the last look; kill, if this is the moment."""
        points = self._points()
        for point in points:
            if point.state in ENDS and point.id not in self.told:
                self.told.add(point.id)
                self.say(point_line(point))
        self.advance(sum(point.state in ENDS for point in points), self.planned)
        if self.killer is not None:
            kill = self.killer.consider(points, lambda: service.fleet(self.client), self._state)
            if kill is not None:
                self.say(
                    f"killed engine {kill.engine} (pid {kill.pid}) with {kill.in_flight} requests of step "
                    f"{kill.step} in flight"
                )

    def _points(self) -> list[PointView]:
        # The run is not known before the trainer's first call.
        with suppress(Unavailable, NotFound):
            return all_points(self.client, RUN)
        return []

    def _state(self, point: str) -> str:
        try:
            return self.client.point(point).state.value
        except EvalfleetError as exc:
            return f"not known: {exc}"


def point_line(point: PointView) -> str:
    """A point that ended, in a line."""
    if point.state is not PointState.DONE:
        why = ": ".join(part for part in (point.reason, point.detail) if part)
        return f"step {point.step:>4}  {point.state} ({why})"
    times = point.timings
    parts = [f"step {point.step:>4}  {plus_minus(point.score, point.stderr)}", f"lag {text(point.lag_steps)}"]
    named = {"stall": times.stall_s, "queue": times.queue_s, "pin": times.pin_s, "generate": times.generate_s}
    parts += [f"{name} {seconds:.1f}" for name, seconds in named.items() if seconds is not None]
    return "  ".join(parts) + " s"
