"""The curve as a picture: curve.png by matplotlib, and curve.html, one file with an SVG of its own and the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from eval_service.contract.states import PointState
from eval_service.contract.wire import PointView

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 20, 44
TICKS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart by colour-blind readers too


@dataclass(frozen=True, slots=True)
class Series:
    """A line of the picture: steps, values and standard errors (0 where there is none)."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    stderrs: tuple[float, ...]


def series_of(points: Sequence[PointView], headline: str) -> list[Series]:
    """The headline first, then the same metric by dataset."""
    done = [point for point in points if point.state is PointState.DONE]
    names = sorted({name for point in done for name in point.metrics if name.endswith(f"/{headline}")})
    return [_series(done, name) for name in (headline, *names)]


def write_png(path: Path, series: Sequence[Series], killed_at: int | None) -> None:
    """Write the picture, 150 dots per inch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2))
    for index, line in enumerate(series):
        _draw(axes, line, COLOURS[index % len(COLOURS)], headline=index == 0)
    if killed_at is not None:
        axes.axvline(killed_at, color="0.5", linestyle=":", linewidth=1, label="an engine killed here")
    axes.set(xlabel="optimizer step", ylabel="held-out exact match", ylim=(-0.03, 1.05))
    axes.grid(alpha=0.25)
    handles, labels = axes.get_legend_handles_labels()
    ordered = sorted(zip(handles, labels, strict=True), key=lambda pair: pair[1] != series[0].name)
    axes.legend(*zip(*ordered, strict=True), frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def write_html(path: Path, series: Sequence[Series], points: Sequence[PointView], killed_at: int | None) -> None:
    """Write a page that needs nothing else, light or dark as the reader has it."""
    path.write_text(_PAGE.format(svg=svg(series, killed_at), legend=_legend(series), table=_table(points)))


def svg(series: Sequence[Series], killed_at: int | None) -> str:
    """The picture as SVG; text and axes take the page's colour."""
    last = max((step for line in series for step in line.steps), default=0) or 1
    parts = [_axes(last)]
    if killed_at is not None:
        x = _x(killed_at, last)
        parts.append(f'<line class="kill" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{x + 4:.1f}" y="{TOP + 12}">an engine killed here</text>')
    for index, line in reversed(list(enumerate(series))):
        parts.append(_svg_line(line, COLOURS[index % len(COLOURS)], last, headline=index == 0))
    label = "held-out exact match over optimizer steps"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _series(done: Sequence[PointView], name: str) -> Series:
    found = [(point.step, point.metrics[name]) for point in done if name in point.metrics]
    return Series(
        name=name,
        steps=tuple(step for step, _ in found),
        values=tuple(metric.value for _, metric in found),
        stderrs=tuple(metric.stderr or 0.0 for _, metric in found),
    )


def _draw(axes: Any, line: Series, colour: str, *, headline: bool) -> None:
    if headline:
        axes.errorbar(
            line.steps, line.values, yerr=line.stderrs, color=colour, marker="o", capsize=3, label=line.name, zorder=3
        )
    else:
        axes.plot(line.steps, line.values, color=colour, marker=".", linewidth=1, alpha=0.7, label=line.name)


def _x(step: float, last: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / last


def _y(value: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value


def _axes(last: int) -> str:
    parts = []
    for tick in TICKS:
        y = _y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.1f}</text>')
    for part in range(5):
        step = last * part // 4
        anchor = f'x="{_x(step, last):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle"'
        parts.append(f"<text {anchor}>{step}</text>")
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">optimizer step</text>')
    return "".join(parts)


def _svg_line(line: Series, colour: str, last: int, *, headline: bool) -> str:
    places = [(_x(step, last), _y(value)) for step, value in zip(line.steps, line.values, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    style = f'stroke="{colour}" stroke-width="{2.5 if headline else 1.2}" opacity="{1 if headline else 0.7}"'
    parts = [f'<polyline fill="none" points="{path}" {style}/>']
    for (x, y), value, stderr, step in zip(places, line.values, line.stderrs, line.steps, strict=True):
        title = f"<title>{escape(line.name)} at step {step}: {value:.3f} ± {stderr:.3f}</title>"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{4 if headline else 2.5}" fill="{colour}">{title}</circle>')
        if headline and stderr:
            ends = f'y1="{_y(value + stderr):.1f}" y2="{_y(value - stderr):.1f}"'
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" {ends} stroke="{colour}"/>')
    return "".join(parts)


def _legend(series: Sequence[Series]) -> str:
    return " ".join(
        f'<span><i style="background:{COLOURS[index % len(COLOURS)]}"></i>{escape(line.name)}</span>'
        for index, line in enumerate(series)
    )


def _table(points: Sequence[PointView]) -> str:
    head = ("step", "state", "score", "± stderr", "lag steps", "stall s", "export s", "pin s", "generate s", "queue s")
    rows = []
    for point in points:
        times = point.timings
        seconds = (times.stall_s, times.export_s, times.pin_s, times.generate_s, times.queue_s)
        cells = [point.step, point.state.value, point.score, point.stderr, point.lag_steps, *seconds, point.attempts]
        rows.append("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in cells) + "</tr>")
    header = "".join(f"<th>{name}</th>" for name in (*head, "attempts"))
    return f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else escape(str(value))


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Evalfleet: the demo's curve</title>
<style>
:root {{ color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --faint: #d0d7de; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6edf3; --paper: #0d1117; --faint: #30363d; }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
svg {{ width: 100%; height: auto; }}
svg text {{ fill: var(--ink); font-size: 12px; }}
.grid {{ stroke: var(--faint); }}
.kill {{ stroke: var(--ink); stroke-dasharray: 2 4; }}
.legend span {{ margin-right: 1.2rem; }}
.legend i {{ display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; border-radius: 50%; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--faint); white-space: nowrap; }}
</style>
</head>
<body>
<h1>Held-out exact match while the model learns</h1>
<p class="legend">{legend}</p>
{svg}
<div class="scroll">{table}</div>
</body>
</html>
"""
