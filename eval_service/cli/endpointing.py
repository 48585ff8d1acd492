"""`evalfleet endpoint`: a checkpoint to talk to, by curl, a notebook or an eval harness."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from eval_service.cli import options
from eval_service.cli.output import harmless, print_json, say
from eval_service.cli.reading import all_points
from eval_service.contract.client import EvalClient
from eval_service.contract.errors import NotFound
from eval_service.contract.serving import ServingView
from eval_service.contract.states import ENDS
from eval_service.contract.wire import PointView


def endpoint(
    run: options.Run,
    step: Annotated[int, typer.Argument(min=0, metavar="STEP", help="The point's step; the base model is 0.")],
    for_s: Annotated[float, typer.Option("--for", min=1.0, help="Seconds from now; asked again, they begin anew.")] = (
        3600.0
    ),
    close: Annotated[bool, typer.Option("--close", help="End it now.")] = False,
    url: options.Url = options.DEFAULT_URL,
    as_json: options.Json = False,
) -> None:
    """Serve a step's snapshot under an OpenAI and a native address, or end that."""
    with options.connect(url) as client:
        view = _close(client, run, step) if close else client.serve(_point(client, run, step).id, for_s=for_s)
    if as_json:
        print_json(view)
        return
    say(view.url)
    if not view.open:
        say("closed")
    elif not view.engines:  # to stderr: a shell takes stdout for the address, as the docs show
        told = view.detail or "no engine serves it yet: requests wait for one"
        print(f"evalfleet endpoint: {harmless(told)}", file=sys.stderr)


def _close(client: EvalClient, run: str, step: int) -> ServingView:
    for point in _points(client, run, step):
        try:
            return client.end_serving(point.id)
        except NotFound:
            continue
    raise NotFound(f"step {step} of {run} is not served", field="step")


def _point(client: EvalClient, run: str, step: int) -> PointView:
    """Its points share a snapshot: one that has ended, if there is one; else the service says what is in the way."""
    found = _points(client, run, step)
    return next((point for point in found if point.state in ENDS and point.snapshot), found[0])


def _points(client: EvalClient, run: str, step: int) -> list[PointView]:
    found = [point for point in all_points(client, run) if point.step == step]
    if not found:
        raise NotFound(f"run {run} has no point at step {step}", field="step", hint=f"see `evalfleet points {run}`")
    return found
