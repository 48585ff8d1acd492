"""`evalfleet export`: the curve as a table, a row for each metric of each point, for pandas, DuckDB or a spreadsheet.

A point without a result has one row, which says why.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from eval_service.cli import options
from eval_service.cli.reading import all_points
from eval_service.contract.errors import ConfigError, InvalidRequest
from eval_service.contract.metric_keys import dataset_of, metric_key
from eval_service.contract.wire import PointView
from eval_service.trackers.lines import points_of

_POINT = ("run", "step", "suite", "state", "reason", "point", "digest", "weight_version", "pin_proof")
_METRIC = ("key", "dataset", "metric", "headline", "value", "stderr", "low", "high", "n")
_COSTS = ("lag_steps", "stall_s", "export_s", "canary_s", "queue_s", "pin_s", "generate_s", "score_s", "duration_s")
COLUMNS = (*_POINT, *_METRIC, "alarms", *_COSTS, "ended_at", "samples_path")


class Format(StrEnum):
    """What is written."""

    CSV = "csv"
    PARQUET = "parquet"
    JSON = "json"


def export(
    run: options.Run,
    format_: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.CSV,
    suite: Annotated[str | None, typer.Option(help="Only this suite.")] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", help="A jsonl tracker's points.jsonl, read instead of the service.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A file; left out: stdout. Parquet needs one.")] = None,
    url: options.Url = options.DEFAULT_URL,
    as_json: options.Json = False,
) -> None:
    """Write the curve of a run, a row for each metric of each point, as CSV, Parquet or JSON."""
    if as_json and format_ is Format.PARQUET:
        raise InvalidRequest("--json is another format", field="format", hint="leave one of the two out")
    chosen = Format.JSON if as_json else format_
    if chosen is Format.PARQUET and out is None:
        raise InvalidRequest("Parquet is no text to print", field="out", hint="name a file with --out")
    rows = [row for point in _points(run, suite, from_, url) for row in curve_rows(point)]
    if out is None:
        typer.echo(_text(rows, chosen), nl=False)
        return
    try:
        _write(rows, chosen, out)
    except OSError as exc:
        raise ConfigError(f"can't be written: {exc}", field="out") from exc


def _points(run: str, suite: str | None, from_: Path | None, url: str) -> list[PointView]:
    if from_ is not None:
        return [point for point in points_of(from_, run, suite) if not point.superseded]
    with options.connect(url) as client:
        return list(all_points(client, run, suite))


def curve_rows(point: PointView) -> Iterator[dict[str, Any]]:
    """A point as rows of `COLUMNS`."""
    shared: dict[str, Any] = dict.fromkeys(COLUMNS)
    told = point.model_dump(mode="json", exclude={"timings", "metrics", "alarms", "history"})
    shared |= {name: told[name] for name in COLUMNS if name in told and name != "headline"}
    shared |= point.timings.model_dump() | {"point": point.id, "alarms": ",".join(alarm.kind for alarm in point.alarms)}
    if not point.metrics:
        yield shared
    for name, metric in point.metrics.items():
        dataset, bare = dataset_of(name)
        named = {"key": metric_key(point.suite, name), "dataset": dataset, "metric": bare}
        yield {**shared, **named, "headline": name == point.headline, **metric.model_dump(exclude={"prompts"})}


def _text(rows: list[dict[str, Any]], chosen: Format) -> str:
    if chosen is Format.JSON:
        return json.dumps(rows, indent=2) + "\n"
    written = io.StringIO()
    writer = csv.DictWriter(written, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return written.getvalue()


def _write(rows: list[dict[str, Any]], chosen: Format, out: Path) -> None:
    if chosen is not Format.PARQUET:
        out.write_text(_text(rows, chosen), encoding="utf-8")
        return
    import pyarrow as pa  # only here: it is heavy, and no other command needs it
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows, schema=_schema(pa)), out)


def _schema(pa: Any) -> Any:
    """Fixed, so that a column that happens to be empty has its type all the same."""
    whole = {"step", "n", "lag_steps"}
    texts = {*_POINT, "key", "dataset", "metric", "alarms", "samples_path"} - whole
    kinds = {name: pa.int64() if name in whole else pa.string() if name in texts else pa.float64() for name in COLUMNS}
    return pa.schema(list((kinds | {"headline": pa.bool_()}).items()))
