"""Short ways to examine a snapshot and to say which one fault it should have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval_service.admission import doctor
from eval_service.admission.checks import Report, find_faults
from eval_service.contract.wire import Source


def examine(directory: Path, **changes: Any) -> Report:
    """The checks as admission runs them, under the root two levels up."""
    return find_faults(directory, **{"source": Source.STAGING, "roots": [directory.parents[1]], **changes})


def only_fault(report: Report) -> tuple[str, str]:
    """Code and field of the one fault that there is."""
    assert len(report.faults) == 1, doctor.render(report)
    return report.faults[0].code.value, report.faults[0].field
