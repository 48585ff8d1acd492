"""Commands on the numbers of a run: the curve with comparisons, two steps compared, the samples that flipped."""

from __future__ import annotations

from typing import Annotated

import typer

from eval_service.cli import options
from eval_service.cli.output import columns, print_json, say
from eval_service.cli.reading import PAGE, all_points, verdict_of
from eval_service.contract.client import EvalClient
from eval_service.contract.curves import Curve, CurvePoint, sentence
from eval_service.contract.errors import Conflict, NotFound
from eval_service.contract.results import Comparison, Flip
from eval_service.contract.states import PointState

FirstStep = Annotated[int, typer.Argument(min=0, metavar="STEP1", help="The step to compare with.")]
SecondStep = Annotated[int, typer.Argument(min=0, metavar="STEP2", help="The step that is judged.")]
Suite = Annotated[str | None, typer.Option(help="Only this suite; else all that both steps have.")]
Dataset = Annotated[str | None, typer.Option(help="Only this dataset's prompts.")]


def compare(
    run: options.Run,
    step1: FirstStep,
    step2: SecondStep,
    suite: Suite = None,
    dataset: Dataset = None,
    url: options.Url = options.DEFAULT_URL,
    as_json: options.Json = False,
) -> None:
    """Say whether one step is better than another, by the prompts that both scored."""
    with options.connect(url) as client:
        found = _compare_all(client, run, (step1, step2), suite, dataset, limit=0)
    print_json(found) if as_json else say("\n".join(comparison_text(one) for one in found))


def diff(
    run: options.Run,
    step1: FirstStep,
    step2: SecondStep,
    suite: Suite = None,
    dataset: Dataset = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many prompts of a suite.")] = 20,
    url: options.Url = options.DEFAULT_URL,
    as_json: options.Json = False,
) -> None:
    """Show the prompts whose score changed from one step to another, with both outputs."""
    with options.connect(url) as client:
        found = [
            _with_flips(client, one, limit) for one in _compare_all(client, run, (step1, step2), suite, dataset, limit)
        ]
    print_json(found) if as_json else say("\n".join(_flips_text(one) for one in found))


def curve(
    run: options.Run,
    suite: Annotated[str | None, typer.Option(help="Left out: the run's first.")] = None,
    against: Annotated[
        str, typer.Option(help="What each point is compared with: before (the one before it), best, or a step.")
    ] = "before",
    url: options.Url = options.DEFAULT_URL,
    as_json: options.Json = False,
) -> None:
    """Show the curve of a suite, and whether each point is better than the one before it."""
    with options.connect(url) as client:
        found = client.curve(run, suite=suite, against=against)
        while found.uncompared:  # what the service compared for one answer it knows at the next
            more = client.curve(run, suite=suite, against=against)
            if more.uncompared >= found.uncompared:
                break
            found = more
    print_json(found) if as_json else say(curve_text(found))


def curve_text(found: Curve) -> str:
    """A line a point: its score with the 95% interval, and what it is beside another one."""
    head = f"{found.run} {found.suite}, {found.headline or 'no result yet'}"
    rows = [[point.step, *_told(point, found.headline)] for point in found.points]
    lines = [head, columns("step score interval beside", rows)] if rows else [head, "no points"]
    if found.uncompared:
        lines.append(f"{found.uncompared} points are not compared yet: ask again")
    return "\n".join(lines)


def _told(point: CurvePoint, headline: str | None) -> list[object]:
    span = point.values.get(headline or "")
    if span is None:
        return [f"{point.state}: {point.reason}" if point.reason else point.state, None, None]
    interval = f"{span.low:.3f}..{span.high:.3f}" if span.low is not None and span.high is not None else None
    return [span.value, interval, point.beside.said if point.beside is not None else None]


def comparison_text(found: Comparison) -> str:
    """A comparison as a sentence, such as `step 800 is better than step 600: +2.1 ± 0.8 points (p=0.01), ...`."""
    name = found.suite if found.dataset is None else f"{found.suite}/{found.dataset}"
    if found.difference is None:
        return f"{name}: there is no prompt that both steps scored{_left_out(found)}"
    means = [side.mean or 0.0 for side in (found.a, found.b)]
    shares = all(0.0 <= mean <= 1.0 for mean in means)
    sides = " -> ".join(f"{100 * mean:.1f}" if shares else f"{mean:.4g}" for mean in means)
    counts = f"{found.improved} better, {found.worsened} worse of {found.prompts} prompts"
    return f"{name}: {sentence(found.a, found.b, found)}; {sides}, {counts}{_left_out(found)}"


def _left_out(found: Comparison) -> str:
    parts = [
        f"{count} {what}"
        for count, what in (
            (found.only_a, f"scored only at step {found.a.step}"),
            (found.only_b, f"only at step {found.b.step}"),
            (found.neither, "at neither"),
        )
        if count
    ]
    return f"; left out: {', '.join(parts)}" if parts else ""


def _flips_text(found: Comparison) -> str:
    shown = f" (the first {len(found.flips)})" if len(found.flips) < found.total else ""
    prompts = "prompt" if found.total == 1 else "prompts"
    head = f"{comparison_text(found)}\n{found.total} {prompts} changed{shown}"
    return "\n".join([head, *(_flip_line(flip) for flip in found.flips)])


def _flip_line(flip: Flip) -> str:
    was, now = verdict_of(flip.a), verdict_of(flip.b)
    change = f"{was} -> {now}" if was != now else f"{flip.score_a:.3g} -> {flip.score_b:.3g}"
    outputs = f"{flip.a.output!r} -> {flip.b.output!r}"
    return f"  {change}  {flip.dataset} {flip.a.prompt!r}: {outputs}  (answer {flip.a.answer!r})"


def _compare_all(
    client: EvalClient, run: str, steps: tuple[int, int], suite: str | None, dataset: str | None, limit: int
) -> list[Comparison]:
    points = [point for point in all_points(client, run, suite) if point.state is PointState.DONE]
    first, second = ({point.suite: point.id for point in points if point.step == step} for step in steps)
    for step, done in zip(steps, (first, second), strict=True):
        if not done:
            hint = f"see `evalfleet points {run}`"
            raise NotFound(f"run {run} has no point with a result at step {step}", field="step", hint=hint)
    both = [name for name in first if name in second]
    if not both:
        had = f"step {steps[0]} has {', '.join(first)}, step {steps[1]} has {', '.join(second)}"
        raise Conflict(f"the two steps have no suite in common: {had}", field="suite")
    query: dict[str, str | int] = {"limit": min(limit, PAGE)} | ({"dataset": dataset} if dataset else {})
    return [client.compare(first[name], second[name], **query) for name in both]


def _with_flips(client: EvalClient, found: Comparison, limit: int) -> Comparison:
    """The comparison with as many of its flips as are asked for, page by page."""
    flips = list(found.flips)
    wanted = min(limit, found.total)
    dataset: dict[str, str | int] = {"dataset": found.dataset} if found.dataset else {}
    while len(flips) < wanted:
        size = min(PAGE, wanted - len(flips))
        page = client.compare(found.a.point, found.b.point, offset=len(flips), limit=size, **dataset).flips
        if not page:
            break
        flips += page
    return found.model_copy(update={"flips": tuple(flips[:wanted])})
