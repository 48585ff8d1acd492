"""A service in memory, spoken to through the real client over an httpx transport of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
from pydantic import BaseModel, RootModel

from eval_service.contract.client import EvalClient
from eval_service.contract.curves import Curve, DrainPage, DrainView
from eval_service.contract.errors import Conflict, EvalfleetError, InvalidRequest, NotFound
from eval_service.contract.results import Action, Advice, Comparison, Direction, SampleView
from eval_service.contract.scaling import ScaleReply, ScaleRequest
from eval_service.contract.serving import ServingView
from eval_service.contract.states import PointState
from eval_service.contract.wire import (
    DispatchReply,
    DispatchRequest,
    DrainRequest,
    FleetView,
    Granted,
    PointPage,
    PointView,
    Receipt,
    RunCommandReply,
    RunSpec,
    RunView,
    SamplePage,
    StatusView,
)


@dataclass
class FakeService:
    """Answers the readers' routes and drain from what it is given; pages hold at most `page` items."""

    points: list[PointView] = field(default_factory=list)
    samples: dict[str, list[SampleView]] = field(default_factory=dict)
    receipts: list[Receipt] = field(default_factory=list)
    fleet: FleetView = field(default_factory=lambda: FleetView(groups=(), seen_at=None))
    page: int = 3
    down: bool = False
    refused: frozenset[int] = frozenset()
    specs: dict[str, RunSpec] = field(default_factory=dict)
    dispatches: list[DispatchRequest] = field(default_factory=list)
    drains: list[DrainRequest] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    comparisons: dict[tuple[str, str], Comparison] = field(default_factory=dict)
    curves: list[Curve] = field(default_factory=list)
    open_drains: list[DrainView] = field(default_factory=list)
    epoch: int = 3
    advice: Callable[[httpx.QueryParams], Advice] = field(default=lambda params: _no_advice())
    served: frozenset[str] = frozenset()
    serving_engines: int = 1
    command_reply: RunCommandReply = field(default_factory=lambda: RunCommandReply(run="demo", points=()))

    def connect(self, url: str) -> EvalClient:
        """What `options.connect` does, to this service."""
        return EvalClient(url, transport=httpx.MockTransport(self._handle), sleep=lambda _: None)

    def _handle(self, request: httpx.Request) -> httpx.Response:
        if self.down:
            raise httpx.ConnectError("connection refused", request=request)
        try:
            return httpx.Response(200, text=self._answer(request).model_dump_json())
        except EvalfleetError as error:
            return httpx.Response(error.status, text=error.envelope().model_dump_json())

    def _answer(self, request: httpx.Request) -> BaseModel:
        match request.url.path.split("/")[1:]:
            case ["points"]:
                return self._points(request.url.params)
            case ["points", point, "serve"]:
                self.asked.append((f"{request.method} serve {request.content.decode()}".strip(), point))
                return self._serving(point, open_=request.method == "POST")
            case ["points", point, *rest]:
                return self._of_point(point, rest, request.url.params)
            case ["dispatch"]:
                return self._dispatch(DispatchRequest.model_validate_json(request.content))
            case ["drain"]:
                self.drains.append(DrainRequest.model_validate_json(request.content))
                return self.receipts.pop(0)
            case ["fleet"]:
                return self.fleet
            case ["fleet", group, "scale"]:
                wanted = ScaleRequest.model_validate_json(request.content).engines
                self.asked.append(("scale", f"{group} {wanted}"))
                return ScaleReply(group=group, engines=wanted, least=0, most=4)
            case ["status"]:
                return self._status()
            case ["drains"]:
                return DrainPage(drains=tuple(self.open_drains), total=len(self.open_drains))
            case ["runs", *rest]:
                return self._of_runs(rest, request)
        raise NotFound(f"no route {request.url.path}")

    def _of_runs(self, rest: list[str], request: httpx.Request) -> BaseModel:
        match rest:
            case []:
                return RootModel[list[RunView]]([self._run(run) for run in sorted({view.run for view in self.points})])
            case [_, "curve"]:
                return self.curves.pop(0)
            case [_, "advice"]:
                return self.advice(request.url.params)
            case [run] if request.method == "PUT":
                self.specs[run] = RunSpec.model_validate_json(request.content)
                return self._run(run)
        return self._order_of_run(rest[0], "delete" if request.method == "DELETE" else "".join(rest[1:]))

    def _of_point(self, point: str, rest: list[str], params: httpx.QueryParams) -> BaseModel:
        match rest:
            case ["samples"]:
                samples = [sample for sample in self.samples.get(point, []) if _matches(sample, params)]
                first, last = self._window(params)
                return SamplePage(samples=tuple(samples[first:last]), total=len(samples))
            case ["compare", other]:
                return self._comparison(point, other, params)
            case [verb]:
                return self._command(point, verb)
        return next(view for view in self.points if view.id == point)

    def _comparison(self, a: str, b: str, params: httpx.QueryParams) -> Comparison:
        found = self.comparisons[a, b]
        first, last = self._window(params)
        return found.model_copy(update={"flips": found.flips[first:last], "dataset": params.get("dataset")})

    def _order_of_run(self, run: str, verb: str) -> BaseModel:
        if verb:
            self.asked.append((verb, run))
        return self.command_reply if verb in ("cancel", "backfill") else self._run(run)

    def _serving(self, point: str, *, open_: bool) -> ServingView:
        if not open_ and point not in self.served:
            raise NotFound(f"point {point} is not served", field="id")
        url, label = f"http://proxy:8710/lanes/{point}", "label" if open_ else None
        return ServingView(
            point=point,
            url=url,
            until=2000.0,
            open=open_,
            engines=self.serving_engines if open_ else 0,
            weight_version=label,
            detail=None,
        )

    def _command(self, point: str, verb: str) -> PointView:
        found = next(view for view in self.points if view.id == point)
        if found.state is PointState.DONE and verb in ("retry", "cancel"):
            raise Conflict("the point is done", field="id")
        self.asked.append((verb, point))
        return found

    def _points(self, params: httpx.QueryParams) -> PointPage:
        if unknown := set(params) - {"run", "suite", "state", "step", "sort", "limit", "offset"}:
            raise InvalidRequest("unknown parameter", field=unknown.pop())
        chosen = [
            view
            for view in self.points
            if params.get("run", view.run) == view.run and params.get("suite", view.suite) == view.suite
            if params.get("state", view.state) == view.state
        ]
        first, last = self._window(params)
        return PointPage(points=tuple(chosen[first:last]), total=len(chosen))

    def _dispatch(self, request: DispatchRequest) -> DispatchReply:
        self.dispatches.append(request)
        if request.step in self.refused:
            raise InvalidRequest("outside the roots", field="snapshot")
        return DispatchReply(
            run=request.run, step=request.step, reservation=request.reservation, outcome=Granted.TAKEN, points=()
        )

    def _window(self, params: httpx.QueryParams) -> tuple[int, int]:
        first = int(params.get("offset", 0))
        return first, first + min(self.page, int(params.get("limit", self.page)))

    def _status(self) -> StatusView:
        return StatusView(
            version="0.1.0",
            epoch=self.epoch,
            controller_at=1000.0,
            controller_alive=True,
            engines={"ready": 2},
            runs={run: {} for run in sorted({view.run for view in self.points})},
            points={},
        )

    def _run(self, run: str) -> RunView:
        if run not in {view.run for view in self.points} | set(self.specs):
            raise NotFound(f"no run {run!r}", field="run", hint="see `evalfleet runs`")
        return RunView(
            run=run,
            spec=self.specs.get(run, RunSpec(root="/snapshots", suites=("letters",))),
            state="active",
            step=50,
            progress_at=1000.0,
            created_at=900.0,
            points={},
            snapshots_kept=2,
            metrics={"letters": 0.5},
        )


def _matches(sample: SampleView, params: httpx.QueryParams) -> bool:
    kinds = {
        "all": True,
        "wrong": sample.score is not None and sample.score < 1,
        "errored": sample.error is not None,
        "truncated": sample.finish_reason == "length",
        "empty": not sample.output.strip(),
        "unparsed": sample.unparsed,
    }
    chosen = [kinds[kind] for kind in params.get_list("which")] or [True]
    return any(chosen) and params.get("search", "") in sample.prompt + sample.output


def _no_advice() -> Advice:
    return Advice(
        run="demo",
        suite="letters",
        metric="score",
        direction=Direction.MAX,
        patience=3,
        action=Action.CONTINUE,
        why="no point has a result yet",
        best=None,
        since_step=None,
        since=None,
        points_since=0,
        without=0,
    )
