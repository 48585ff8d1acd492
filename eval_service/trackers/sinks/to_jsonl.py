"""A run's points as lines beside it, `<root>/<run>/evals/points.jsonl`: the whole of each point, when it has ended.

`trackers.lines.points_of` makes the curve of it again, without the ledger.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval_service.contract.names import EVALS
from eval_service.trackers.lines import POINTS
from eval_service.trackers.told import Item


class Sink:
    """Appends."""

    def __init__(self, config: Mapping[str, Any], state_dir: str) -> None:
        del config, state_dir
        self._written: set[Path] = set()

    def write(self, item: Item) -> None:
        """One line, by one write; a line that was torn by a death is closed first."""
        directory = Path(item["directory"])
        if not directory.parent.is_dir():
            raise OSError(f"{directory.parent} is not there")
        path = directory / EVALS / POINTS
        path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(item["point"] | {"scalars": item["scalars"]}).encode() + b"\n"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        with open(descriptor, "rb+", buffering=0) as file:
            if (size := file.seek(0, os.SEEK_END)) and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            if file.write(line) != len(line):
                raise OSError(f"{path} took a part of a line only")
        self._written.add(path)

    def flush(self) -> None:
        """Sync what was written."""
        while self._written:
            path = self._written.pop()
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
