"""The client of the API: few, slow calls over httpx, every one with a timeout, every error mapped.

Requests are strict; what a newer service adds to its answers is passed over.

Nothing here retries on its own but the long polls (`reserve`, `drain`): short calls under one deadline.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, RootModel, ValidationError

from eval_service.contract.curves import Curve, DrainPage
from eval_service.contract.errors import BY_CODE, Busy, ErrorEnvelope, EvalfleetError, RateLimited, Unavailable
from eval_service.contract.names import check_run
from eval_service.contract.results import Advice, Comparison, Direction, SamplePage
from eval_service.contract.scaling import ScaleReply, ScaleRequest
from eval_service.contract.serving import ServeRequest, ServingView
from eval_service.contract.states import Reason
from eval_service.contract.token import bearer, given_token
from eval_service.contract.wire import (
    DispatchReply,
    DispatchRequest,
    DrainRequest,
    FleetView,
    Health,
    OnTimeout,
    PlannedPoint,
    PointPage,
    PointReport,
    PointView,
    Progress,
    Receipt,
    RunCommandReply,
    RunSpec,
    RunView,
    StatusView,
)

LONG_POLL_S = 20.0
COMPARE_S = 20.0  # more than other reads: it goes through all samples of two points
_PACE_S = 0.2
_Model = TypeVar("_Model", bound=BaseModel)
_Runs = RootModel[tuple[RunView, ...]]


class EvalClient:
    """Talks to one service.

    Args:
        url: where the gateway listens, such as `http://127.0.0.1:8700`.
        timeout_s: of one short call; long polls add theirs.
        token: None: the environment's, `EVALFLEET_TOKEN` or the file that `EVALFLEET_TOKEN_FILE` names, if any.
        transport: another httpx transport, for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 10.0,
        token: str | None = None,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        headers = bearer(token if token is not None else given_token())
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._clock = clock
        self._sleep = sleep
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout_s, transport=transport, trust_env=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; whoever still calls finds the service unavailable."""
        self._http.close()

    # --- trainers

    def put_run(self, run: str, spec: RunSpec) -> RunView:
        """Make a run known, or change it."""
        return self._call(RunView, "PUT", f"/runs/{check_run(run)}", body=spec)

    def progress(self, run: str, step: int) -> None:
        """Tell the trainer's step, so that lag can be known."""
        self._send("POST", f"/runs/{check_run(run)}/progress", body=Progress(step=step))

    def dispatch(self, request: DispatchRequest) -> DispatchReply:
        """Reserve, or hand a snapshot over; one call.

        Raises:
            Busy: backpressure waits; ask again with the same reservation.
            Unavailable: the service can't be reached.
        """
        wait = min(request.wait_s if request.wait_s is not None else LONG_POLL_S, LONG_POLL_S)
        # A hand-over is not held; one that also asks for room is, where the caller says that it would wait.
        held = request.snapshot is None or request.wait_s is not None
        return self._call(DispatchReply, "POST", "/dispatch", body=request, extra_s=wait if held else 0)

    def reserve(self, request: DispatchRequest, *, deadline_s: float) -> DispatchReply:
        """Reserve, waiting for room up to a deadline.

        Raises:
            Busy: there was no room up to the deadline, and the service gave no final answer.
            Unavailable: the service can't be reached.
        """
        until = self._clock() + deadline_s
        while True:
            left = max(0.0, until - self._clock())
            try:
                return self.dispatch(request.model_copy(update={"wait_s": left}))
            except Busy:
                if left == 0.0:
                    raise
                self._sleep(min(_PACE_S, left))

    def report(self, point: str, detail: str, reason: Reason = Reason.EXPORT_FAILED) -> PointView:
        """A reserved point gets no snapshot: its export failed, or (`busy`) the exporter never had room for it."""
        body = PointReport.model_validate({"reason": reason, "detail": detail[:4000]})
        return self._call(PointView, "POST", f"/points/{point}/report", body=body)

    def drain(
        self,
        run: str,
        *,
        planned: Sequence[PlannedPoint] = (),
        timeout_s: float = 600.0,
        on_timeout: OnTimeout = OnTimeout.LEAVE,
        on_progress: Callable[[Receipt], None] | None = None,
    ) -> Receipt:
        """Wait until every point of the run has ended, over restarts of anything, and return the receipt.

        It is still `open` only where the service has kept it open well past the deadline.

        Raises:
            Unavailable: the service could not be reached up to the deadline.
        """
        request = DrainRequest(
            run=run, planned=tuple(planned), timeout_s=timeout_s, on_timeout=on_timeout, drain=str(uuid.uuid4())
        )
        until = self._clock() + timeout_s
        while True:
            asked_at = self._clock()
            try:
                receipt = self._call(Receipt, "POST", "/drain", body=request, extra_s=LONG_POLL_S)
                if not receipt.open or self._clock() >= until + LONG_POLL_S:
                    return receipt
                if on_progress is not None:
                    on_progress(receipt)
                if self._clock() - asked_at < _PACE_S:
                    self._sleep(_PACE_S)  # it answered at once instead of holding the poll
            except (Unavailable, RateLimited):
                if self._clock() >= until:
                    raise
                self._sleep(min(0.5, max(0.0, until - self._clock())))

    # --- commands

    def retry(self, point: str) -> PointView:
        """A new attempt of an ended point.

        Raises:
            Conflict: it is open, done or superseded, or its snapshot is not there.
        """
        return self._call(PointView, "POST", f"/points/{point}/retry")

    def cancel(self, point: str) -> PointView:
        """Take a point back."""
        return self._call(PointView, "POST", f"/points/{point}/cancel")

    def hold(self, point: str) -> PointView:
        """Keep a point's snapshot from garbage collection."""
        return self._call(PointView, "POST", f"/points/{point}/hold")

    def release(self, point: str) -> PointView:
        """Give a held snapshot back to garbage collection."""
        return self._call(PointView, "POST", f"/points/{point}/release")

    def serve(self, point: str, *, for_s: float = 3600.0) -> ServingView:
        """Serve an ended point's snapshot through the proxy; again, for longer."""
        return self._call(ServingView, "POST", f"/points/{point}/serve", body=ServeRequest(for_s=for_s))

    def serving(self, point: str) -> ServingView:
        """How a serving does.

        Raises:
            NotFound: there is none (any more).
        """
        return self._call(ServingView, "GET", f"/points/{point}/serve")

    def end_serving(self, point: str) -> ServingView:
        """End a serving."""
        return self._call(ServingView, "DELETE", f"/points/{point}/serve")

    def cancel_run(self, run: str) -> RunCommandReply:
        """Take back all that is open of a run."""
        return self._call(RunCommandReply, "POST", f"/runs/{check_run(run)}/cancel")

    def backfill(self, run: str) -> RunCommandReply:
        """Retry what was skipped or failed, while its snapshot is there."""
        return self._call(RunCommandReply, "POST", f"/runs/{check_run(run)}/backfill")

    def pause(self, run: str) -> RunView:
        """Start no further points of a run."""
        return self._call(RunView, "POST", f"/runs/{check_run(run)}/pause")

    def resume(self, run: str) -> RunView:
        """End a pause."""
        return self._call(RunView, "POST", f"/runs/{check_run(run)}/resume")

    def delete_run(self, run: str) -> RunView:
        """Delete a run with its results and our own snapshots of it."""
        return self._call(RunView, "DELETE", f"/runs/{check_run(run)}")

    # --- readers

    def status(self) -> StatusView:
        """Fleet, runs, counts."""
        return self._call(StatusView, "GET", "/status")

    def fleet(self) -> FleetView:
        """Engines, pins, in flight."""
        return self._call(FleetView, "GET", "/fleet")

    def scale(self, group: str, engines: int | None) -> ScaleReply:
        """Ask for so many engines of a group; None: as many as its config says."""
        return self._call(
            ScaleReply, "POST", f"/fleet/{quote(group, safe='')}/scale", body=ScaleRequest(engines=engines)
        )

    def run(self, run: str) -> RunView:
        """One run."""
        return self._call(RunView, "GET", f"/runs/{check_run(run)}")

    def runs(self) -> tuple[RunView, ...]:
        """All runs, oldest first."""
        return self._call(_Runs, "GET", "/runs").root

    def drains(self, **query: str | int) -> DrainPage:
        """Drains, the newest first."""
        return self._call(DrainPage, "GET", "/drains", params=query)

    def points(self, **query: str | int) -> PointPage:
        """Points by run, state, suite, step."""
        return self._call(PointPage, "GET", "/points", params=query)

    def point(self, point: str) -> PointView:
        """One point with its attempts."""
        return self._call(PointView, "GET", f"/points/{point}")

    def samples(self, point: str, **query: str | int | list[str]) -> SamplePage:
        """A point's samples; `which` (of several, those of any), `search`, `limit`, `offset`."""
        return self._call(SamplePage, "GET", f"/points/{point}/samples", params=query)

    def compare(self, a: str, b: str, **query: str | int) -> Comparison:
        """Point b beside point a, on the prompts that both scored; `dataset`, and `limit` and `offset` of the flips.

        Raises:
            Conflict: they were not asked the same.
        """
        return self._call(Comparison, "GET", f"/points/{a}/compare/{b}", params=query, extra_s=COMPARE_S)

    def curve(
        self, run: str, *, suite: str | None = None, metrics: Sequence[str] = (), against: str | None = None
    ) -> Curve:
        """The points of a run's suite (None: its first), in few bytes.

        Args:
            metrics: none: the headline alone.
            against: what each point is compared with on the same prompts: `before` (the one before it), `best`, or a
                step. A long curve takes several calls: `uncompared` of the points are not yet.

        Raises:
            NotFound: no such run, or no result at that step.
        """
        asked = {"suite": suite, "metric": list(metrics), "against": against}
        query = {name: value for name, value in asked.items() if value}
        return self._call(Curve, "GET", f"/runs/{check_run(run)}/curve", params=query, extra_s=COMPARE_S)

    def advice(
        self,
        run: str,
        *,
        suite: str | None = None,
        metric: str | None = None,
        direction: Direction | None = None,
        patience: int = 3,
        min_delta: float = 0.0,
    ) -> Advice:
        """Whether the run still gets better, by its points so far: what a trainer may poll to stop early.

        Args:
            suite: None: the run's first.
            metric: None: the suite's headline, with the suite's direction.
            patience: points in a row without improvement by more than `min_delta` that make it `stop`.

        Raises:
            InvalidRequest: no such suite, or no point has the metric.
        """
        asked = {"suite": suite, "metric": metric, "direction": direction}
        query = {name: value for name, value in asked.items() if value is not None}
        numbers = {"patience": patience, "min_delta": min_delta}
        return self._call(Advice, "GET", f"/runs/{check_run(run)}/advice", params=query | numbers)

    def receipt(self, drain: str, *, wait_s: float = 0.0) -> Receipt:
        """A drain's receipt, as it stands or waiting for it."""
        return self._call(Receipt, "GET", f"/drains/{drain}", params={"wait_s": wait_s}, extra_s=wait_s)

    def ready(self) -> Health:
        """Whether the ledger can be written and a controller acts."""
        return self._call(Health, "GET", "/readyz")

    # --- how

    def _call(
        self,
        model: type[_Model],
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        params: Mapping[str, Any] | None = None,
        extra_s: float = 0.0,
    ) -> _Model:
        response = self._send(method, path, body=body, params=params, extra_s=extra_s)
        try:
            return model.model_validate_json(response.content, extra="ignore")
        except ValidationError as exc:
            raise Unavailable(f"{method} {path} answered with something else than {model.__name__}: {exc}") from exc

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        params: Mapping[str, Any] | None = None,
        extra_s: float = 0.0,
    ) -> httpx.Response:
        try:
            response = self._http.request(
                method,
                path,
                content=body.model_dump_json() if body is not None else None,
                headers={"content-type": "application/json"} if body is not None else None,
                params=params,
                timeout=httpx.Timeout(self._timeout_s, read=self._timeout_s + extra_s),
            )
        except RuntimeError as exc:
            if not self._http.is_closed:
                raise
            raise Unavailable(f"{method} {self.url}{path}: the client was closed") from exc
        except httpx.HTTPError as exc:
            raise Unavailable(
                f"{method} {self.url}{path}: {type(exc).__name__}: {exc}",
                hint="is `evalfleet serve` running at this address?",
            ) from exc
        if response.is_success:
            return response
        raise _error(response)


def _error(response: httpx.Response) -> EvalfleetError:
    try:
        body = ErrorEnvelope.model_validate_json(response.content, extra="ignore").error
    except ValidationError:
        # Not our envelope: a proxy that has nobody behind it (yet), which is the same as not being there.
        return Unavailable(f"HTTP {response.status_code}: {response.text[:200]}")
    return BY_CODE.get(body.code, EvalfleetError)(body.message, field=body.field, hint=body.hint)
