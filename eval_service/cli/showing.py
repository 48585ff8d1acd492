"""`evalfleet show`: all that is known of one point: attempts and their faults, timings, metrics, proof."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from eval_service.cli import options
from eval_service.cli.output import columns, plus_minus, print_json, say, text
from eval_service.cli.reading import all_points
from eval_service.contract.errors import NotFound
from eval_service.contract.wire import PointView


def show(
    run: options.Run,
    step: Annotated[int, typer.Argument(min=0, metavar="STEP", help="The point's step; the base model is 0.")],
    suite: Annotated[str | None, typer.Option(help="Only this suite's point.")] = None,
    url: options.Url = options.DEFAULT_URL,
    as_json: options.Json = False,
) -> None:
    """Show all that is known of a step's points: attempts and faults, timings, metrics, how the weights were proven."""
    with options.connect(url) as client:
        found = [client.point(point.id) for point in all_points(client, run, suite) if point.step == step]
    if not found:
        raise NotFound(f"run {run} has no point at step {step}", field="step", hint=f"see `evalfleet points {run}`")
    print_json(found) if as_json else say("\n\n".join(point_text(view) for view in found))


def point_text(view: PointView) -> str:
    """A point in full."""
    why = ": ".join(part for part in (view.reason, view.detail) if part)
    proof = f"{view.pin_proof or '-'} ({view.weight_version})" if view.weight_version else None
    facts = {
        "point": view.id,
        "of": f"run {view.run}, step {view.step}, suite {view.suite} ({view.kind}{', forced' * view.force})",
        "state": f"{view.state}{f' ({why})' if why else ''}",
        "score": plus_minus(view.score, view.stderr) + (f" ({view.headline})" if view.headline else ""),
        "lag": f"{view.lag_steps} steps" if view.lag_steps is not None else None,
        "snapshot": view.snapshot,
        "digest": view.digest,
        "proof": proof,
        "held": "yes" if view.held else None,
        "samples": view.samples_path,
    }
    lines = [f"{name:10}{value}" for name, value in facts.items() if value is not None]
    took = {name.removesuffix("_s"): value for name, value in view.timings.model_dump().items() if value is not None}
    if took:
        lines.append(f"{'seconds':10}" + ", ".join(f"{name} {value:.3f}" for name, value in took.items()))
    lines += [f"{'alarm':10}{alarm.kind}: {alarm.message}" for alarm in view.alarms]
    if view.metrics:
        rows = [[name, metric.value, metric.stderr, metric.n] for name, metric in sorted(view.metrics.items())]
        lines += ["", columns("metric value stderr n", rows)]
    if view.history:
        lines += ["", columns("attempt started seconds outcome engines detail", _attempts(view))]
    return "\n".join(lines)


def _attempts(view: PointView) -> list[list[object]]:
    return [
        [
            attempt.number,
            datetime.fromtimestamp(attempt.started_at).astimezone().isoformat(" ", "seconds"),
            text(attempt.ended_at - attempt.started_at) if attempt.ended_at is not None else None,
            attempt.outcome,
            ",".join(attempt.engines),
            attempt.detail,
        ]
        for attempt in view.history
    ]
