"""How commands print: JSON for programs, aligned columns for people, and what an absent value looks like.

What models, engines and others wrote reaches a terminal without anything that it would obey.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from pydantic import BaseModel

ABSENT = "-"


def print_json(value: BaseModel | Sequence[BaseModel] | dict[str, Any] | list[Any]) -> None:
    """Print one JSON document."""
    if isinstance(value, BaseModel):
        typer.echo(value.model_dump_json(indent=2))
        return
    items = [item.model_dump(mode="json") if isinstance(item, BaseModel) else item for item in value]
    typer.echo(json.dumps(value if isinstance(value, dict) else items, indent=2))


def say(lines: str) -> None:
    """Print lines for people."""
    typer.echo(harmless(lines))


def harmless(lines: str) -> str:
    """Lines in which each control character is shown as its escape, but for the ends of lines and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in lines)


def plain(value: Any) -> str:
    """A value as a cell of one line."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text(value))


def columns(header: str, rows: Iterable[Sequence[Any]]) -> str:
    """A table in plain text, each column as wide as its widest cell; `header` is words, None is a dash."""
    cells = [header.split()] + [[plain(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join(lines)


def text(value: Any) -> str:
    """A value as a cell."""
    if value is None or value == "":
        return ABSENT
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def plus_minus(value: float | None, stderr: float | None) -> str:
    """A number with its standard error."""
    if value is None:
        return ABSENT
    return f"{value:.3f}" if stderr is None else f"{value:.3f} ± {stderr:.3f}"


def counts(by_name: dict[Any, int]) -> str:
    """Counts in a line, without the zeros."""
    return ", ".join(f"{count} {name}" for name, count in by_name.items() if count) or "none"
