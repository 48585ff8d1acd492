"""Reads what the trainer leaves in its output directory: the step log and the receipt of its drain.

The step log is JSON lines of {"time", "event", ...}, where event `step_end` is a completed step.
"""

from __future__ import annotations

import json
from pathlib import Path

from eval_service.contract import names
from eval_service.contract.wire import Receipt

STEP_LOG = "steps.jsonl"
STEP_END = "step_end"


def trained_until(output_dir: Path) -> float | None:
    """When the last step was completed, in Unix seconds; None if there is no log or no step in it."""
    last: float | None = None
    try:
        lines = (output_dir / STEP_LOG).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut short by a kill
        if entry.get("event") == STEP_END:
            last = float(entry["time"])
    return last


def receipt(output_dir: Path) -> Receipt | None:
    """The receipt of the trainer's drain; None if it never came to one."""
    try:
        return Receipt.model_validate_json((output_dir / names.RECEIPT).read_bytes())
    except OSError:
        return None
