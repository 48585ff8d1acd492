"""What a jsonl tracker writes beside a run, read back: of lines that tell of the same point the last one counts."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from eval_service.contract.errors import ConfigError
from eval_service.contract.wire import PointView

POINTS = "points.jsonl"


def points_of(path: Path, run: str | None = None, suite: str | None = None) -> list[PointView]:
    """The points of such a file as they were last told, by step; lines that were torn are passed over.

    Raises:
        ConfigError: it can't be read.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as exc:
        raise ConfigError(f"{path} can't be read: {exc.strerror}", field="from") from exc
    found: dict[str, PointView] = {}
    for line in lines:
        try:
            told = json.loads(line)
            told.pop("scalars", None)
            point = PointView.model_validate(told)
        except (ValueError, ValidationError, AttributeError):
            continue
        if (run is None or point.run == run) and (suite is None or point.suite == suite):
            found[point.id] = point
    return sorted(found.values(), key=lambda point: (point.step, point.created_at))
