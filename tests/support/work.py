"""Points on the running service that are under way for as long as somebody looks for them."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from eval_service.contract.errors import Unavailable
from eval_service.contract.states import ENDS, PointState
from eval_service.contract.wire import DispatchRequest, EngineView, FleetView, PointView, RunSpec, Source
from tests.support.live import DONE, PROMPTS, Live, wait_for

_T = TypeVar("_T")


@dataclass
class Work:
    """Points of a run on the base model, one after another: what is to be caught at work is under way for who looks,
    however late they look and however fast it is."""

    live: Live
    run: str
    suite: str
    at_once: int = 1
    steps: int = 0

    def __post_init__(self) -> None:
        spec = RunSpec(root=str(self.live.root), suites=(self.suite,), max_in_flight=10_000)
        self.live.client.put_run(self.run, spec)

    def begin(self) -> None:
        """Dispatch the next points."""
        for _ in range(self.at_once):
            request = DispatchRequest(
                run=self.run,
                step=self.steps,
                source=Source.CALLER,
                snapshot=str(self.live.model),
                reservation=str(uuid.uuid4()),
            )
            self.live.client.dispatch(request)
            self.steps += 1

    def until(self, look: Callable[[], _T | None], what: str, timeout_s: float = 90.0) -> _T:
        """Wait until there is something to be seen, beside points that are under way all the while."""

        def seen() -> _T | None:
            found = look()
            if found is None or found is False:
                with suppress(Unavailable):
                    if all(point.state in ENDS for point in self.live.points(self.run)):
                        self.begin()
            return found

        return wait_for(seen, what, timeout_s)

    def running(self) -> PointView | None:
        """A point whose samples are under way."""
        with suppress(Unavailable):
            return next((point for point in self.live.points(self.run) if point.state is PointState.RUNNING), None)
        return None

    def stop_engine(self) -> EngineView:
        """An engine, its server stopped while it has requests of a point in flight: killed now, it dies at work."""
        return self.until(self._stopped_engine, "an engine at work")

    @staticmethod
    def let_go(engine: EngineView) -> None:
        """A server that was stopped goes on, if nobody has ended it."""
        if engine.server_pid is not None:
            with suppress(ProcessLookupError):
                os.kill(engine.server_pid, signal.SIGCONT)

    def _stopped_engine(self) -> EngineView | None:
        engine = next((engine for engine in self.live.engines() if engine.point and engine.server_pid), None)
        if engine is None or engine.server_pid is None:
            return None
        with suppress(ProcessLookupError):
            os.kill(engine.server_pid, signal.SIGSTOP)
            view = wait_for(self._fleet, "a view")
            for _ in range(2):  # the next one may be on its way already; what the second shows came later than the stop
                view = wait_for(partial(self._fleet, view.seen_at), "a later view")
            for now in (now for group in view.groups for now in group.engines if now.nonce == engine.nonce):
                if now.point is not None and now.in_flight:
                    return now
        self.let_go(engine)
        return None

    def _fleet(self, after: float | None = None) -> FleetView | None:
        with suppress(Unavailable):
            view = self.live.client.fleet()
            return view if after is None or (view.seen_at or 0.0) > after else None
        return None

    def whole(self, timeout_s: float = 180.0) -> list[PointView]:
        """Wait until all are done, and see that each has each of its samples once, of the weights it was pinned to."""
        points = self.live.ended(self.run, self.steps, timeout_s)
        assert [(point.step, point.state) for point in points] == [(step, DONE) for step in range(self.steps)]
        for point in points:
            samples = self.live.samples(point.id)
            assert sorted(sample.index for sample in samples) == list(range(PROMPTS))
            assert {sample.weight_version for sample in samples} == {point.weight_version}
        return points
