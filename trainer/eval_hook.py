"""Reserve, export, dispatch: what happens at a step that is evaluated.

Invariants: nothing here stops training, every failure becomes a recorded end of the point; a reservation comes before
its export is paid for, except where an earlier launch left a snapshot of the step: then content is compared first.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval_service.contract.errors import EvalfleetError, SnapshotFault, Unavailable
from eval_service.contract.manifest import Canary
from eval_service.contract.snapshot import SnapshotWriter
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import DispatchRequest, Granted, PlannedPoint, Source
from trainer.cadence import Point
from trainer.config import RunConfig
from trainer.crash import crash_point
from trainer.service_link import ServiceLink
from trainer.steplog import StepLog
from trainer.stopping import Stopped
from trainer.traces import Traces, find_traces
from trainer.weights import Weights, exporter_name


class ExportFailed(Exception):
    """The snapshot could not be written; what was written of it is removed."""


@dataclass(frozen=True, slots=True)
class Given:
    """A snapshot that is there already: a caller's directory, or an own checkpoint."""

    path: Path
    source: Source
    digest: str | None = None
    export_s: float | None = None


@dataclass(frozen=True, slots=True)
class Ticket:
    """Room for a step's points. `points` are the service's ids; none where the trainer granted itself the room."""

    request: DispatchRequest
    points: tuple[str, ...] = ()


@dataclass(slots=True)
class Written:
    """A snapshot in its partial directory."""

    writer: SnapshotWriter
    canary: Canary | None
    digest: str
    export_s: float
    canary_s: float


@dataclass(slots=True)
class EvalHook:
    """Evaluates points of one run.

    Args:
        weights: writes the weights of now; needed where points are exported.
        checkpoint: gives the step's own `save_hf` directory; needed where points reuse it.
    """

    config: RunConfig
    link: ServiceLink
    log: StepLog
    weights: Weights | None = None
    checkpoint: Callable[[int], Given] | None = None
    clock: Callable[[], float] = time.monotonic
    planned: list[PlannedPoint] = field(default_factory=list)
    skipped: list[PlannedPoint] = field(default_factory=list)
    began: float = 0.0

    def evaluate(self, point: Point, *, base: Path | None = None, if_lacking: bool = False) -> None:
        """Have a point evaluated.

        Args:
            base: the directory to evaluate, for a base model; else the weights of now.
            if_lacking: only where the ledger has no such point, whatever its content.
        """
        planned = [PlannedPoint(step=point.step, suite=suite) for suite in self.config.eval.suites]
        self.planned += [entry for entry in planned if entry not in self.planned]
        self.began = self.clock()
        try:
            self._evaluate(point, base, if_lacking)
            self.link.nudge()
        except Stopped:
            self.log.write("eval_skipped", step=point.step, reason=Reason.BUSY, detail="stopped while waiting for room")
        except Exception as exc:  # noqa: BLE001 - the edge: training goes on, the log says what became of the point
            self.log.write("eval_failed", step=point.step, detail=f"{type(exc).__name__}: {exc}")

    def _evaluate(self, point: Point, base: Path | None, if_lacking: bool) -> None:
        here = self.link.flush()
        traces = find_traces(self.link.client if here else None, self.config.run.root, self.config.run.name, point.step)
        if if_lacking and self._has_all(traces):
            self.log.write("eval_known", step=point.step)
        elif base is not None:
            self._evaluate_given(point, traces, lambda: Given(base, Source.CALLER))
        elif self.config.reuses and self.checkpoint is not None:
            checkpoint = self.checkpoint
            self._evaluate_given(point, traces, lambda: checkpoint(point.step))
        else:
            self._evaluate_export(point, traces)

    def _has_all(self, traces: Traces) -> bool:
        if traces.ledger is None:  # it can't be asked; what is published will be found by the service's scan
            return bool(traces.published)
        return traces.covered() >= set(self.config.eval.suites)

    # --- a directory that is there already

    def _evaluate_given(self, point: Point, traces: Traces, give: Callable[[], Given]) -> None:
        try:
            given = give()
        except (OSError, SnapshotFault) as exc:
            ticket = self._reserve(point, traces, self.config.eval.suites, Source.REUSE)
            self._export_failed(point, ticket, exc)
            return
        covered = traces.covered(snapshot=str(given.path))
        suites = tuple(suite for suite in self.config.eval.suites if suite not in covered)
        if not suites:
            self.log.write("eval_known", step=point.step)
            return
        ticket = self._reserve(point, traces, suites, given.source)
        if ticket is not None:
            self._send(ticket, snapshot=str(given.path), digest=given.digest, **self._times(given.export_s))

    # --- an export

    def _evaluate_export(self, point: Point, traces: Traces) -> None:
        with ExitStack() as stack:
            written: Written | None = None
            suites = self.config.eval.suites
            if traces.has_snapshots:
                written = self._write_early(stack, point, traces)
                covered = traces.covered(digest=written.digest) if written else set()
                suites = tuple(suite for suite in suites if suite not in covered)
            if not suites:
                self.log.write("eval_known", step=point.step)
                return
            ticket = self._room(point, traces, suites, written)
            if ticket is None:
                return
            try:
                written = written or stack.enter_context(self._write(point.step))
                self._publish(ticket, written)
            except ExportFailed as exc:
                self._export_failed(point, ticket, exc)

    def _write_early(self, stack: ExitStack, point: Point, traces: Traces) -> Written | None:
        try:
            return stack.enter_context(self._write(point.step))
        except ExportFailed as exc:
            self.log.write("export_retried", step=point.step, detail=str(exc))
            return None

    def _room(self, point: Point, traces: Traces, suites: tuple[str, ...], written: Written | None) -> Ticket | None:
        unsent = traces.unsent(written.digest) if written else None
        if unsent is None:
            return self._reserve(point, traces, suites, Source.STAGING)
        # Published by a launch that died before it could say so: the same points, over the bound if need be.
        return Ticket(unsent.model_copy(update={"snapshot": None, "digest": None, "deferred": True}))

    @contextmanager
    def _write(self, step: int) -> Iterator[Written]:
        if self.weights is None:
            raise ExportFailed("there are no weights to export")
        run = self.config.run
        with ExitStack() as stack:
            try:
                started = self.clock()
                writer = stack.enter_context(SnapshotWriter(run.root, run.name, step, exporter_name()))
                crash_point("in_export", step)
                self.weights.fill(writer)
                digest = writer.digest()
                filled = self.clock()
                canary = self.weights.canary()
                written = Written(writer, canary, digest, filled - started, self.clock() - filled)
            except Exception as exc:
                raise ExportFailed(f"{type(exc).__name__}: {exc}") from exc
            yield written

    def _publish(self, ticket: Ticket, written: Written) -> None:
        canary_s = written.canary_s if written.canary else None
        request = ticket.request.model_copy(update={**self._times(written.export_s, canary_s), "wait_s": None})
        started = self.clock()
        try:
            published = written.writer.publish(canary=written.canary, dispatch=[request.model_dump(mode="json")])
        except (OSError, SnapshotFault) as exc:
            raise ExportFailed(str(exc)) from exc
        publish_s = self.clock() - started
        step, digest = request.step, published.manifest.digest
        self.log.write("eval_exported", step=step, snapshot=str(published.path), digest=digest, reused=published.reused)
        crash_point("after_publish", step)
        times = self._times(written.export_s + publish_s, canary_s)
        self._send(ticket, snapshot=str(published.path), digest=digest, **times)

    def _times(self, export_s: float | None, canary_s: float | None = None) -> dict[str, float | None]:
        """All that this step has waited is its stall, but for the canary, which is a cost of its own."""
        stall_s = max(0.0, self.clock() - self.began - (canary_s or 0.0))
        return {"export_s": export_s, "canary_s": canary_s, "stall_s": stall_s}

    def _export_failed(self, point: Point, ticket: Ticket | None, exc: Exception) -> None:
        reason = Reason.EXPORT_FAILED
        self.log.write("eval_failed", step=point.step, reason=reason, detail=str(exc))
        for known in ticket.points if ticket else ():
            self.link.report(known, str(exc))

    # --- reserve and dispatch

    def _reserve(self, point: Point, traces: Traces, suites: tuple[str, ...], source: Source) -> Ticket | None:
        reservation = traces.reserved(suites) or str(uuid.uuid4())
        request = DispatchRequest(
            run=self.config.run.name,
            step=point.step,
            suites=suites,
            kind=point.kind,
            force=point.force,
            priority=self.config.eval.priority,
            reservation=reservation,
            source=source,
        )
        if traces.ledger is None:
            return self._grant_itself(request)
        try:
            reply = self.link.client.reserve(request, deadline_s=self.config.eval.reserve_timeout_s)
        except Unavailable as exc:
            self.log.write("service_away", step=request.step, detail=str(exc))
            return self._grant_itself(request)
        except EvalfleetError as exc:
            self.log.write("eval_refused", step=point.step, detail=str(exc))
            return None
        waiting = tuple(ref.id for ref in reply.points if ref.state is PointState.RESERVED)
        if reply.outcome is Granted.SKIPPED or not waiting:
            reasons = sorted({str(ref.reason) for ref in reply.points if ref.reason})
            # No reason: the service's scan took the snapshot in meanwhile.
            event = "eval_skipped" if reasons else "eval_known"
            self.log.write(event, step=point.step, reason=",".join(reasons))
            return None
        self.log.write("eval_reserved", step=point.step, reservation=reservation, force=point.force, kind=point.kind)
        crash_point("after_reserve", point.step)
        return Ticket(request, waiting)

    def _grant_itself(self, request: DispatchRequest) -> Ticket | None:
        if not request.force and self.link.unsent() >= self.config.eval.max_in_flight:
            self.skipped += [PlannedPoint(step=request.step, suite=suite) for suite in request.suites or ()]
            self.log.write("eval_skipped", step=request.step, reason=Reason.BUSY)
            return None
        return Ticket(request.model_copy(update={"deferred": True}))

    def _send(self, ticket: Ticket, **fields: Any) -> None:
        request = ticket.request.model_copy(update={**fields, "wait_s": None})
        try:
            reply = self.link.client.dispatch(request)
        except Unavailable as exc:
            self.link.keep(request.model_copy(update={"deferred": True}))
            self.log.write("eval_deferred", step=request.step, detail=str(exc))
            return
        except EvalfleetError as exc:
            self.log.write("eval_refused", step=request.step, detail=str(exc))
            for known in ticket.points:  # they would wait for a snapshot until their reservation expires
                self.link.report(known, f"the service refused the snapshot: {exc}")
            return
        points = {ref.suite: ref.id for ref in reply.points}
        self.log.write("eval_dispatched", step=request.step, outcome=reply.outcome, points=points)
        crash_point("after_dispatch", request.step)
