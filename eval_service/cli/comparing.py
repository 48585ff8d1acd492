"""Commands on the numbers of a run: compare two steps, list the samples that flipped, write the curve to a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from eval_service.cli import options
from eval_service.cli.output import print_json, say
from eval_service.cli.reading import PAGE, all_points, verdict_of
from eval_service.contract.client import EvalClient
from eval_service.contract.errors import Conflict, NotFound
from eval_service.contract.results import Comparison, Flip, Verdict
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


def comparison_text(found: Comparison) -> str:
    """A comparison as a sentence, such as `step 800 is better than step 600: +2.1 ± 0.8 points (p=0.01), ...`."""
    name = found.suite if found.dataset is None else f"{found.suite}/{found.dataset}"
    if found.difference is None:
        return f"{name}: there is no prompt that both steps scored{_left_out(found)}"
    said = {
        Verdict.BETTER: f"step {found.b.step} is better than step {found.a.step}",
        Verdict.WORSE: f"step {found.b.step} is worse than step {found.a.step}",
        Verdict.UNDECIDED: f"step {found.b.step} can't be told from step {found.a.step}",
    }[found.verdict]
    show, unit = _scale(found)
    sure = f" ± {show(found.stderr)}" if found.stderr is not None else ""
    p = f"p={found.p_value:.2g}" if found.p_value is not None else "no p-value"
    sides = f"{show(found.a.mean or 0.0)} -> {show(found.b.mean or 0.0)}"
    counts = f"{found.improved} better, {found.worsened} worse of {found.prompts} prompts"
    sign = "+" if found.difference >= 0 else ""
    return f"{name}: {said}: {sign}{show(found.difference)}{sure}{unit} ({p}); {sides}, {counts}{_left_out(found)}"


def _scale(found: Comparison) -> tuple[Callable[[float], str], str]:
    """Shares are told in points of a hundred."""
    means = (found.a.mean or 0.0, found.b.mean or 0.0)
    if all(0.0 <= mean <= 1.0 for mean in means):
        return (lambda value: f"{100 * value:.1f}"), " points"
    return (lambda value: f"{value:.4g}"), ""


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
    head = f"{comparison_text(found)}\n{found.total} prompts changed{shown}"
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
