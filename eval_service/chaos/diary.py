"""What a simulated trainer tells of itself: a line of JSON an event, whole or not there, whatever kills it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Diary:
    """The diary of one run, over all lives of its trainer."""

    path: Path

    def write(self, event: str, **fields: Any) -> None:
        """Add an event."""
        line = json.dumps({"event": event, "at": time.time(), **fields}) + "\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)

    def read(self) -> list[dict[str, Any]]:
        """All events so far, oldest first."""
        try:
            lines = self.path.read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def events(self, *names: str) -> list[dict[str, Any]]:
        """The named events."""
        return [entry for entry in self.read() if entry["event"] in names]
