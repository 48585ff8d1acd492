"""Commands that change what the service does: retry, cancel, backfill, hold, release, pause, resume, delete, scale."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from eval_service.cli import options
from eval_service.cli.output import columns, counts, print_json, say
from eval_service.cli.reading import all_points
from eval_service.contract.client import EvalClient
from eval_service.contract.errors import InvalidRequest, NotFound
from eval_service.contract.states import ENDS, PointState
from eval_service.contract.wire import PointView, RunCommandReply, RunView
from eval_service.fleet_config import EVAL_GROUP

Step = Annotated[int, typer.Argument(min=0, metavar="STEP", help="The point's step; the base model is 0.")]
Suite = Annotated[str | None, typer.Option(help="Only this suite's point; else those of all suites.")]


def retry(
    run: options.Run,
    step: Step,
    suite: Suite = None,
    url: options.Url = options.DEFAULT_URL,
    as_json: options.Json = False,
) -> None:
    """Try an ended point again, while its snapshot is there."""
    _on_points(url, run, step, suite, EvalClient.retry, as_json, ENDS - {PointState.DONE})


def cancel(
    run: options.Run,
    step: Annotated[int | None, typer.Argument(min=0, metavar="[STEP]", help="Left out: the whole run.")] = None,
    suite: Suite = None,
    url: options.Url = options.DEFAULT_URL,
    as_json: options.Json = False,
) -> None:
    """Take back what has not ended of a run, or of one of its steps; what runs is stopped."""
    if step is not None:
        _on_points(url, run, step, suite, EvalClient.cancel, as_json, frozenset(PointState) - ENDS)
        return
    if suite is not None:
        raise InvalidRequest("--suite goes with a step", field="suite", hint=f"evalfleet cancel {run} STEP --suite ...")
    _on_run(url, run, EvalClient.cancel_run, as_json)


def backfill(run: options.Run, url: options.Url = options.DEFAULT_URL, as_json: options.Json = False) -> None:
    """Try again what was skipped or failed, where the snapshot is still kept; tell what was left, and why."""
    _on_run(url, run, EvalClient.backfill, as_json)


def hold(run: options.Run, step: Step, url: options.Url = options.DEFAULT_URL, as_json: options.Json = False) -> None:
    """Keep the snapshots of a step from garbage collection."""
    _on_snapshots(url, run, step, EvalClient.hold, as_json)


def release(
    run: options.Run, step: Step, url: options.Url = options.DEFAULT_URL, as_json: options.Json = False
) -> None:
    """Give held snapshots of a step back to garbage collection."""
    _on_snapshots(url, run, step, EvalClient.release, as_json)


def pause(run: options.Run, url: options.Url = options.DEFAULT_URL, as_json: options.Json = False) -> None:
    """Start no further points of a run; what runs goes on, and dispatches are taken in."""
    with options.connect(url) as client:
        _show_run(client.pause(run), as_json)


def resume(run: options.Run, url: options.Url = options.DEFAULT_URL, as_json: options.Json = False) -> None:
    """End a run's pause."""
    with options.connect(url) as client:
        _show_run(client.resume(run), as_json)


def delete(
    run: options.Run,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    url: options.Url = options.DEFAULT_URL,
    as_json: options.Json = False,
) -> None:
    """Delete a run: its points, its results and our own snapshots of it; never a caller's directory."""
    with options.connect(url) as client:
        if not yes:
            _confirm(client.run(run))
        _show_run(client.delete_run(run), as_json)


def scale(
    engines: Annotated[str, typer.Argument(metavar="N", help="How many engines; `auto`: as the config says.")],
    group: Annotated[str, typer.Option(help="Of which group.")] = EVAL_GROUP,
    url: options.Url = options.DEFAULT_URL,
    as_json: options.Json = False,
) -> None:
    """Set how many engines a group should have; points under way lose nothing."""
    if engines != "auto" and not engines.isdecimal():
        raise InvalidRequest(f"{engines!r} is no number of engines", field="N", hint="a number, or `auto`")
    with options.connect(url) as client:
        reply = client.scale(group, None if engines == "auto" else int(engines))
    told = "as its config says" if reply.engines is None else f"{reply.engines} engines"
    print_json(reply) if as_json else say(f"{reply.group}: {told} ({reply.least} to {reply.most})")


def _confirm(view: RunView) -> None:
    if not sys.stdin.isatty():
        raise InvalidRequest("nobody is there to be asked", field="yes", hint="give --yes to delete without asking")
    what = f"{view.run}: {counts(view.points)}, {view.snapshots_kept} snapshots. Delete all of it?"
    typer.confirm(what, abort=True, err=True)


def _on_points(
    url: str,
    run: str,
    step: int,
    suite: str | None,
    call: Callable[[EvalClient, str], PointView],
    as_json: bool,
    states: frozenset[PointState],
) -> None:
    """Where no point is in one of the states, the service says why it can't be done."""
    with options.connect(url) as client:
        found = _points_at(client, run, step, suite)
        chosen = [point for point in found if point.state in states] or found
        _show_points([call(client, point.id) for point in chosen], as_json)


def _on_snapshots(url: str, run: str, step: int, call: Callable[[EvalClient, str], PointView], as_json: bool) -> None:
    """Points of several suites may share one snapshot: each is asked for once."""
    with options.connect(url) as client:
        by_snapshot = {point.snapshot or point.id: point for point in _points_at(client, run, step, None)}
        _show_points([call(client, point.id) for point in by_snapshot.values()], as_json)


def _points_at(client: EvalClient, run: str, step: int, suite: str | None) -> list[PointView]:
    found = [point for point in all_points(client, run, suite) if point.step == step]
    if not found:
        raise NotFound(f"run {run} has no point at step {step}", field="step", hint=f"see `evalfleet points {run}`")
    return found


def _on_run(url: str, run: str, call: Callable[[EvalClient, str], RunCommandReply], as_json: bool) -> None:
    with options.connect(url) as client:
        reply = call(client, run)
        steps = {point.id: point.step for point in all_points(client, run)}
    if as_json:
        print_json(reply)
        return
    rows = [[steps.get(ref.id), ref.suite, ref.state, ref.reason] for ref in reply.points]
    left = [f"left: step {point.step} {point.suite}: {point.why}" for point in reply.left]
    say("\n".join(([columns("step suite state reason", rows)] if rows else ["no point"]) + left))


def _show_points(views: list[PointView], as_json: bool) -> None:
    rows = [[view.step, view.suite, view.state, view.reason, "held" if view.held else None] for view in views]
    print_json(views) if as_json else say(columns("step suite state reason snapshot", rows))


def _show_run(view: RunView, as_json: bool) -> None:
    print_json(view) if as_json else say(f"{view.run} is {view.state}: {counts(view.points)}")
