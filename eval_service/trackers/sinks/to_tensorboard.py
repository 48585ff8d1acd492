"""Event files for TensorBoard: `<path>/<run>`, or `<root>/<run>/evals/tensorboard` where no path is given.

Each worker begins a file of its own for a run; TensorBoard reads them in the order in which they were begun, and puts a
point where its step is, whenever it came.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from eval_service.contract.names import EVALS
from eval_service.trackers.told import Item

_MOST_OPEN = 32


class Sink:
    """Writes scalars."""

    def __init__(self, config: Mapping[str, Any], state_dir: str) -> None:
        del state_dir
        self._base = config["path"]
        self._writers: dict[str, EventFileWriter] = {}

    def write(self, item: Item) -> None:
        """A point's scalars at its step, and at the time at which it ended."""
        values = [Summary.Value(tag=key, simple_value=value) for key, value in item["scalars"].items()]
        event = Event(step=item["point"]["step"], wall_time=item["at"], summary=Summary(value=values))
        self._writer(item).add_event(event)

    def flush(self) -> None:
        """To the disk."""
        for writer in self._writers.values():
            writer.flush()

    def _writer(self, item: Item) -> EventFileWriter:
        beside = Path(item["directory"])
        if self._base is None and not beside.parent.is_dir():
            raise OSError(f"{beside.parent} is not there")
        directory = os.path.join(self._base, item["run"]) if self._base else str(beside / EVALS / "tensorboard")
        if directory not in self._writers:
            if len(self._writers) >= _MOST_OPEN:
                self._writers.pop(next(iter(self._writers))).close()
            self._writers[directory] = EventFileWriter(directory)
        return self._writers[directory]
