"""Commands that only look: status, fleet, runs, points, samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from eval_service.cli import options
from eval_service.cli.output import columns, counts, plus_minus, print_json, say
from eval_service.contract.client import EvalClient
from eval_service.contract.errors import NotFound
from eval_service.contract.wire import EngineView, FleetView, PointView, RunView, SampleView, StatusView

PAGE = 200


def status(url: options.Url = options.DEFAULT_URL, as_json: options.Json = False) -> None:
    """Show the service at a glance: controller, engines, runs, points."""
    with options.connect(url) as client:
        view = client.status()
    print_json(view) if as_json else say(_status_text(view))


def fleet(url: options.Url = options.DEFAULT_URL, as_json: options.Json = False) -> None:
    """Show the engines: what each does and what it has pinned."""
    with options.connect(url) as client:
        view = client.fleet()
    print_json(view) if as_json else say(_fleet_text(view))


def runs(url: options.Url = options.DEFAULT_URL, as_json: options.Json = False) -> None:
    """List the runs with their counts of points and their latest scores."""
    with options.connect(url) as client:
        views = [client.run(name) for name in client.status().runs]
    print_json(views) if as_json else say(_runs_text(views))


def points(
    run: options.Run,
    suite: Annotated[str | None, typer.Option(help="Only this suite.")] = None,
    url: options.Url = options.DEFAULT_URL,
    as_json: options.Json = False,
) -> None:
    """Show the points of a run: the curve as a table."""
    with options.connect(url) as client:
        views = all_points(client, run, suite)
    print_json(views) if as_json else say(points_text(views))


def samples(
    run: options.Run,
    step: Annotated[int, typer.Argument(min=0, metavar="STEP", help="The point's step; the base model is 0.")],
    suite: Annotated[str | None, typer.Option(help="Only this suite.")] = None,
    wrong: Annotated[bool, typer.Option("--wrong", help="Those that were scored and are not fully right.")] = False,
    errored: Annotated[bool, typer.Option("--errored", help="Those that have no score, with the error.")] = False,
    truncated: Annotated[bool, typer.Option("--truncated", help="Those that max_new_tokens cut.")] = False,
    empty: Annotated[bool, typer.Option("--empty", help="Those with nothing but white space.")] = False,
    unparsed: Annotated[bool, typer.Option("--unparsed", help="Those in which no extractor found an answer.")] = False,
    search: Annotated[str | None, typer.Option(help="A text in prompt, output, answer or error.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many samples of a point.")] = 20,
    url: options.Url = options.DEFAULT_URL,
    as_json: options.Json = False,
) -> None:
    """Show what the model answered at a step; of several kinds, those of any."""
    flags = {"wrong": wrong, "errored": errored, "truncated": truncated, "empty": empty, "unparsed": unparsed}
    kinds = [name for name, on in flags.items() if on]
    with options.connect(url) as client:
        found = [point for point in all_points(client, run, suite) if point.step == step]
        if not found:
            raise NotFound(f"run {run} has no point at step {step}", field="step", hint=f"see `evalfleet points {run}`")
        shown = [s for point in found for s in some_samples(client, point.id, kinds=kinds, search=search, limit=limit)]
    print_json(shown) if as_json else say(samples_text(shown))


def all_points(client: EvalClient, run: str, suite: str | None = None) -> list[PointView]:
    """Every point of a run that counts (no newer one took its place), by step and suite."""
    query: dict[str, str | int] = {"run": run}
    if suite is not None:
        query["suite"] = suite
    found: list[PointView] = []
    while True:
        page = client.points(**query, limit=PAGE, offset=len(found))
        found.extend(page.points)
        if not page.points or len(found) >= page.total:
            break
    return sorted((point for point in found if not point.superseded), key=lambda point: (point.step, point.suite))


def some_samples(
    client: EvalClient,
    point: str,
    *,
    kinds: Sequence[str] = (),
    search: str | None = None,
    limit: int | None = None,
) -> list[SampleView]:
    """A point's samples that match, in order; the service looks for them, page by page."""
    query: dict[str, str | int | list[str]] = {"which": list(kinds)} if kinds else {}
    if search:
        query["search"] = search
    chosen: list[SampleView] = []
    while limit is None or len(chosen) < limit:
        size = PAGE if limit is None else min(PAGE, limit - len(chosen))
        page = client.samples(point, limit=size, offset=len(chosen), **query)
        chosen += page.samples
        if not page.samples or len(chosen) >= page.total:
            break
    return chosen


def points_text(views: list[PointView]) -> str:
    """The curve as a table."""
    header = (
        "step suite state score interval lag stall_s export_s pin_s generate_s queue_s attempts proof alarms reason"
    )
    if not views:
        return "no points"
    alarms = [f"step {v.step} {v.suite}: {alarm.kind}: {alarm.message}" for v in views for alarm in v.alarms]
    return "\n".join([columns(header, [_point_row(view) for view in views]), *alarms])


def samples_text(shown: list[SampleView]) -> str:
    """Samples as lines: right or wrong, then question, answer and output."""
    return "\n".join(_sample_line(sample) for sample in shown) or "no such samples"


def verdict_of(sample: SampleView) -> str:
    """One word: what is not right is told by why, where that is known."""
    if sample.error is not None:
        return "error"
    if (sample.score or 0.0) >= 1.0:
        return "right"
    if sample.finish_reason == "length":
        return "truncated"
    if not sample.output.strip():
        return "empty"
    return "unparsed" if sample.unparsed else "wrong"


def _interval(view: PointView) -> str | None:
    metric = view.metrics.get(view.headline or "")
    if metric is None or metric.low is None or metric.high is None:
        return None
    return f"{metric.low:.3f}..{metric.high:.3f}"


def _point_row(view: PointView) -> list[object]:
    times = view.timings
    return [
        view.step,
        view.suite,
        view.state,
        plus_minus(view.score, view.stderr),
        _interval(view),
        view.lag_steps,
        times.stall_s,
        times.export_s,
        times.pin_s,
        times.generate_s,
        times.queue_s,
        view.attempts,
        view.pin_proof,
        ",".join(alarm.kind for alarm in view.alarms),
        f"{view.reason}: {view.detail}" if view.reason and view.detail else view.reason,
    ]


def _sample_line(sample: SampleView) -> str:
    got = sample.error or repr(sample.output)
    return f"{verdict_of(sample)}  {sample.prompt!r} -> {got}  (answer {sample.answer!r}; {sample.engine})"


def _status_text(view: StatusView) -> str:
    lines = [
        f"version     {view.version}",
        f"controller  {'acts' if view.controller_alive else 'is not there'} (epoch {view.epoch})",
        f"engines     {counts(view.engines)}",
        f"tokens/s    {_rates(view.tokens_per_s)}",
        f"points      {counts(view.points)}",
    ]
    return "\n".join(lines + [f"run {name}: {counts(by_state)}" for name, by_state in view.runs.items()])


def _rates(by_engine: dict[str, float]) -> str:
    each = ", ".join(f"{engine} {rate:,.1f}" for engine, rate in sorted(by_engine.items()))
    return f"{sum(by_engine.values()):,.1f} ({each})" if each else "0"


def _fleet_text(view: FleetView) -> str:
    header = "group engine state in_flight tokens_per_s point pinned restarts pid url detail"
    rows = [_engine_row(group.name, engine) for group in view.groups for engine in group.engines]
    wanted = [
        f"{group.name} ({group.grade}): {group.ready} of {group.desired} ready, {group.actual} there"
        for group in view.groups
    ]
    return "\n".join([*wanted, columns(header, rows)])


def _engine_row(group: str, engine: EngineView) -> list[object]:
    work = (engine.state, engine.in_flight, engine.tokens_per_s, engine.point, engine.weight_version)
    return [group, engine.id, *work, engine.restarts, engine.server_pid, engine.url, engine.detail]


def _runs_text(views: list[RunView]) -> str:
    rows = [[v.run, v.state, v.step, counts(v.points), v.snapshots_kept, _scores(v)] for v in views]
    return columns("run state step points snapshots scores", rows) if views else "no runs"


def _scores(view: RunView) -> str:
    return ", ".join(f"{suite} {score:.3f}" for suite, score in view.metrics.items())
