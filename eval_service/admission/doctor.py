"""`evalfleet doctor`: every fault of a snapshot at once, for people and for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval_service.admission.checks import Report, find_faults
from eval_service.contract import names
from eval_service.contract.wire import Source


def examine(
    directory: Path,
    *,
    source: Source | None = None,
    roots: Sequence[Path] | None = None,
    allow_auto_map: bool = False,
) -> Report:
    """Run all the admission checks on a directory, going on after a fault.

    Args:
        source: whose it is; None guesses from what lies there (see `guess_source`).
        roots: the service's, where they are known.
    """
    return find_faults(
        directory.absolute(),
        source=source or guess_source(directory),
        roots=roots,
        allow_auto_map=allow_auto_map,
        thorough=True,
    )


def guess_source(directory: Path) -> Source:
    """`staging` for a published name or anything that an exporter of ours left there, else `caller`."""
    published = names.parse_step_dir(directory.name) is not None
    ours = published or directory.name.startswith(names.PARTIAL_PREFIX)
    try:
        left = any((directory / name).exists() for name in names.BESIDE_THE_MODEL)
    except (OSError, ValueError):
        left = False
    return Source.STAGING if ours or left else Source.CALLER


def render(report: Report) -> str:
    """The report as text, a fault to a paragraph."""
    lines = [f"{report.directory}: {_verdict(report)}"]
    for fault in report.faults:
        lines.append(f"  {fault.code}  {fault.field}: {fault.message}")
        if fault.hint:
            lines.append(f"      -> {fault.hint}")
    return "\n".join(lines)


def as_json(report: Report) -> dict[str, Any]:
    """The report for `--json`."""
    return {
        "snapshot": str(report.directory),
        "ok": report.ok,
        "digest": report.manifest.digest if report.manifest else None,
        "manifest": "described" if report.described else "read" if report.manifest else None,
        "facts": asdict(report.facts) if report.facts else None,
        "faults": [asdict(fault) for fault in report.faults],
    }


def exit_code(report: Report) -> int:
    """0 for a snapshot that may be evaluated, else 1."""
    return 0 if report.ok else 1


def _verdict(report: Report) -> str:
    if not report.ok:
        count = len(report.faults)
        return f"{count} fault{'s' if count > 1 else ''}"
    facts = report.facts
    assert facts is not None
    return (
        f"sound; {facts.architecture}, {facts.num_parameters:,} parameters in {facts.dtype}, "
        f"vocabulary {facts.vocab_size:,}, context {facts.context_length:,}"
    )
