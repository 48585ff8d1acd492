"""Reserve, export, dispatch: what happens at a step that is evaluated.

Invariants: nothing here stops training, every failure becomes a recorded end of the point; a reservation comes before
its export is paid for, except where an earlier launch left a snapshot of the step: then content is compared first.
Of an export the training thread makes the copy and the canary; writing, publishing and dispatching happen behind.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval_service.contract.errors import EvalfleetError, NotFound, SnapshotFault
from eval_service.contract.snapshot import SnapshotWriter
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import DispatchRequest, Granted, PlannedPoint, Source
from trainer.cadence import Point
from trainer.config import Evaluated
from trainer.crash import crash_point
from trainer.service_link import LATER, ServiceLink
from trainer.stager import Staged, Stager
from trainer.steplog import StepLog
from trainer.stopping import Stopped
from trainer.traces import Traces, find_traces
from trainer.weights import ExportFailed, exporter_name


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
class Stall:
    """What a step has waited for, in seconds: all of it, but for the canary, which is a cost of its own."""

    began: float
    ended: float | None = None
    canary_s: float | None = None

    def seconds(self, now: float) -> float:
        """Up to now, if it has not ended."""
        return max(0.0, (self.ended if self.ended is not None else now) - self.began - (self.canary_s or 0.0))


@dataclass(slots=True)
class Export:
    """One on its way: what is written, for whom, and what it has cost."""

    point: Point
    traces: Traces
    staged: Staged
    stall: Stall
    ticket: Ticket | None
    export_s: float = 0.0
    digest: str = ""


@dataclass(slots=True)
class EvalHook:
    """Evaluates points of one run; on rank 0 alone.

    Args:
        stager: exports the weights of now; needed where points are exported.
        checkpoint: gives the step's own `save_hf` directory; needed where points reuse it.
    """

    config: Evaluated
    link: ServiceLink
    log: StepLog
    stager: Stager | None = None
    checkpoint: Callable[[int], Given] | None = None
    clock: Callable[[], float] = time.monotonic
    planned: list[PlannedPoint] = field(default_factory=list)
    skipped: list[PlannedPoint] = field(default_factory=list)
    granted: set[str] = field(default_factory=set)  # reservations that the trainer granted itself, and under way

    def evaluate(self, point: Point, *, base: Path | None = None, if_lacking: bool = False) -> None:
        """Have a point evaluated; what is exported is only copied here, the rest is behind.

        Args:
            base: the directory to evaluate, for a base model; else the weights of now.
            if_lacking: only where the ledger has no such point, whatever its content.
        """
        planned = [PlannedPoint(step=point.step, suite=suite) for suite in self.config.eval.suites]
        self.planned += [entry for entry in planned if entry not in self.planned]
        with self._recorded(point.step):
            self._evaluate(point, Stall(self.clock()), base, if_lacking)
            self.link.nudge()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for what is behind; tells whether all of it has ended."""
        return self.stager is None or self.stager.background.join(timeout_s)

    @contextmanager
    def _recorded(self, step: int) -> Iterator[None]:
        try:
            yield
        except Stopped:
            self.log.write("eval_skipped", step=step, reason=Reason.BUSY, detail="stopped while waiting for room")
        except Exception as exc:  # noqa: BLE001 - the edge: training goes on, the log says what became of the point
            self.log.write("eval_failed", step=step, detail=f"{type(exc).__name__}: {exc}")

    def _evaluate(self, point: Point, stall: Stall, base: Path | None, if_lacking: bool) -> None:
        here = self.link.flush()
        traces = find_traces(self.link.client if here else None, self.config.run.root, self.config.run.name, point.step)
        if if_lacking and self._has_all(traces):
            self.log.write("eval_known", step=point.step)
        elif base is not None:
            self._evaluate_given(point, traces, stall, lambda: Given(base, Source.CALLER))
        elif self.config.reuses and self.checkpoint is not None:
            checkpoint = self.checkpoint
            self._evaluate_given(point, traces, stall, lambda: checkpoint(point.step))
        else:
            self._evaluate_export(point, traces, stall)

    def _has_all(self, traces: Traces) -> bool:
        if traces.ledger is None:  # it can't be asked; what is published will be found by the service's scan
            return bool(traces.published)
        return traces.covered() >= set(self.config.eval.suites)

    # --- a directory that is there already

    def _evaluate_given(self, point: Point, traces: Traces, stall: Stall, give: Callable[[], Given]) -> None:
        try:
            given = give()
        except (OSError, SnapshotFault, ExportFailed) as exc:
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
            times = {"export_s": given.export_s, "stall_s": stall.seconds(self.clock())}
            self._send(ticket, snapshot=str(given.path), digest=given.digest, **times)

    # --- an export: the step's part

    def _evaluate_export(self, point: Point, traces: Traces, stall: Stall) -> None:
        if self.stager is None:
            raise ExportFailed("there are no weights to export")
        ticket = None
        if not traces.has_snapshots:
            ticket = self._reserve(point, traces, self.config.eval.suites, Source.STAGING)
            if ticket is None:
                return
        try:
            staged = self._stage(self.stager, point)
        except Exception as exc:  # noqa: BLE001 - the edge: a reservation that gets no snapshot would be waited for
            self._export_failed(point, ticket, exc)
            return
        if staged is None:
            waited = f"the last export had not left the buffer within {self._patience_s(point):g} s"
            self._give_up(point, ticket, Reason.BUSY, f"{waited} (eval.buffer_timeout_s)")
            return
        stall.canary_s = staged.canary_s if staged.canary else None
        stall.ended = self.clock()
        self.log.write("eval_staged", step=point.step, stall_s=stall.seconds(0.0), copy_s=staged.copy_s)
        export = Export(point, traces, staged, stall, ticket)
        self.stager.submit(lambda: self._finish(export))

    def _stage(self, stager: Stager, point: Point) -> Staged | None:
        run = self.config.run
        writer = SnapshotWriter(run.root, run.name, point.step, exporter_name())
        return stager.stage(writer, self._patience_s(point))

    def _patience_s(self, point: Point) -> float:
        # A forced point is not dropped for want of a buffer that will be free.
        section = self.config.eval
        return max(section.buffer_timeout_s, section.drain_timeout_s if point.force else 0.0)

    # --- an export: behind

    def _finish(self, export: Export) -> None:
        with self._recorded(export.point.step):
            try:
                with ExitStack() as stack:
                    # Not entered: whatever goes wrong with the directory, every rank must come to `fill`.
                    stack.push(export.staged.writer)
                    self._fill(export)
                    if self._still_wanted(export):
                        self._publish(export)
            except ExportFailed as exc:
                self._export_failed(export.point, export.ticket, exc)
            self.link.nudge()

    def _fill(self, export: Export) -> None:
        assert self.stager is not None
        began = self.clock()
        try:
            self.stager.weights.fill(export.staged.writer)
        except ExportFailed:
            raise
        except Exception as exc:
            raise ExportFailed(f"{type(exc).__name__}: {exc}") from exc
        try:
            export.digest = export.staged.writer.digest()
        except (OSError, SnapshotFault) as exc:
            raise ExportFailed(str(exc)) from exc
        export.export_s = export.staged.copy_s + self.clock() - began

    def _still_wanted(self, export: Export) -> bool:
        """Where an earlier launch left snapshots of this step, content decides; only then is room asked for."""
        if export.ticket is not None:
            return True
        covered = export.traces.covered(digest=export.digest)
        suites = tuple(suite for suite in self.config.eval.suites if suite not in covered)
        if not suites:
            self.log.write("eval_known", step=export.point.step)
            return False
        unsent = export.traces.unsent(export.digest)
        if unsent is None:
            export.ticket = self._reserve(export.point, export.traces, suites, Source.STAGING)
        else:
            # Published by a launch that died before it could say so: the same points, over the bound if need be.
            update = {"snapshot": None, "digest": None, "deferred": True}
            export.ticket = Ticket(unsent.model_copy(update=update))
        return export.ticket is not None

    def _publish(self, export: Export) -> None:
        assert export.ticket is not None
        request = export.ticket.request.model_copy(update={**self._times(export), "wait_s": None})
        began = self.clock()
        try:
            published = export.staged.writer.publish(
                canary=export.staged.canary, dispatch=[request.model_dump(mode="json")]
            )
        except (OSError, SnapshotFault) as exc:
            raise ExportFailed(str(exc)) from exc
        export.export_s += self.clock() - began
        step, digest = request.step, published.manifest.digest
        times = self._times(export)
        self.log.write(
            "eval_exported", step=step, snapshot=str(published.path), digest=digest, reused=published.reused, **times
        )
        crash_point("after_publish", step)
        self._send(export.ticket, snapshot=str(published.path), digest=digest, **times)

    def _times(self, export: Export) -> dict[str, float | None]:
        stall = export.stall
        return {"export_s": export.export_s, "canary_s": stall.canary_s, "stall_s": stall.seconds(self.clock())}

    def _export_failed(self, point: Point, ticket: Ticket | None, exc: Exception) -> None:
        self._give_up(point, ticket, Reason.EXPORT_FAILED, str(exc))

    def _give_up(self, point: Point, ticket: Ticket | None, reason: Reason, detail: str) -> None:
        if ticket is not None:
            self.granted.discard(ticket.request.reservation)
        event = "eval_skipped" if reason is Reason.BUSY else "eval_failed"
        self.log.write(event, step=point.step, reason=reason, detail=detail)
        for known in ticket.points if ticket else ():
            self.link.report(known, detail, reason)

    # --- reserve and dispatch

    def _reserve(self, point: Point, traces: Traces, suites: tuple[str, ...], source: Source) -> Ticket | None:
        reservation = traces.reserved(suites) or str(uuid.uuid4())
        request = DispatchRequest(
            run=self.config.run.name,
            step=point.step,
            suites=suites,
            kind=point.kind,
            force=point.force,
            reservation=reservation,
            source=source,
        )
        if traces.ledger is None:
            return self._grant_itself(request)
        try:
            reply = self.link.client.reserve(request, deadline_s=self.config.eval.reserve_timeout_s)
        except (*LATER, NotFound) as exc:  # NotFound: it has lost its ledger
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
        under_way = set(self.granted)  # read first: what leaves it meanwhile is in the outbox already
        unsent = under_way | {kept.reservation for _, kept in self.link.pending()}
        if not request.force and len(unsent) >= self.config.eval.max_in_flight:
            self.skipped += [PlannedPoint(step=request.step, suite=suite) for suite in request.suites or ()]
            self.log.write("eval_skipped", step=request.step, reason=Reason.BUSY)
            return None
        self.granted.add(request.reservation)
        return Ticket(request.model_copy(update={"deferred": True}))

    def _send(self, ticket: Ticket, **fields: Any) -> None:
        request = ticket.request.model_copy(update={**fields, "wait_s": None})
        try:
            reply = self.link.client.dispatch(request)
        except (*LATER, NotFound) as exc:  # NotFound: it has lost its ledger
            try:
                self.link.keep(request.model_copy(update={"deferred": True}))
            finally:
                self.granted.discard(request.reservation)
            self.log.write("eval_deferred", step=request.step, detail=str(exc))
            return
        except EvalfleetError as exc:
            self.granted.discard(request.reservation)
            self.log.write("eval_refused", step=request.step, detail=str(exc))
            for known in ticket.points:  # they would wait for a snapshot until their reservation expires
                self.link.report(known, f"the service refused the snapshot: {exc}", Reason.EXPORT_FAILED)
            return
        self.granted.discard(request.reservation)
        points = {ref.suite: ref.id for ref in reply.points}
        self.log.write("eval_dispatched", step=request.step, outcome=reply.outcome, points=points)
        crash_point("after_dispatch", request.step)
