"""`evalfleet doctor`: the admission checks on a directory, with no service; and, if asked, a load into an engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval_service.cli import options
from eval_service.cli.output import print_json, say
from eval_service.contract.errors import EvalfleetError, InvalidRequest, SnapshotFault
from eval_service.scratch import Kind, scratch

if TYPE_CHECKING:
    from eval_service.admission.checks import Report
    from eval_service.engine.trial import Trial


def doctor(
    snapshot: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="A snapshot's directory, or its URL.")],
    engine: Annotated[
        bool, typer.Option("--engine", help="Load it into an engine too, and compare its canary.")
    ] = False,
    fleet: Annotated[Path | None, typer.Option(help="With --engine: the eval group that the engine is one of.")] = None,
    as_json: options.Json = False,
) -> None:
    """Check a snapshot, or any exporter's directory. Exit 0: it may be evaluated; 1: it would be skipped, and why."""
    from eval_service.admission import doctor as admission

    if fleet is not None and not engine:
        raise InvalidRequest("goes with --engine", field="fleet", hint="add --engine")
    with _examined(snapshot) as found:
        trial = _try_out(found, fleet) if engine and found.ok else None
    if as_json:
        print_json(admission.as_json(found) | ({"engine": _as_json(trial)} if engine else {}))
    else:
        say(admission.render(found))
        if engine:
            say(_render(trial))
    raise typer.Exit(admission.exit_code(found) or int(trial is not None and not trial.ok))


@contextmanager
def _examined(snapshot: str) -> Iterator[Report]:
    """What the checks find; what is in an object store is fetched for as long as that is looked at."""
    from eval_service.admission import doctor as admission
    from eval_service.admission.checks import Report
    from eval_service.admission.faults import Fault
    from eval_service.objects.config import ObjectsConfig
    from eval_service.objects.places import Places
    from eval_service.objects.urls import check_url, is_url, last_of, parent_of

    if not is_url(snapshot):
        yield admission.examine(Path(snapshot))
        return
    url = check_url(snapshot, "snapshot")
    with scratch(Kind.DOCTOR) as place:
        config = ObjectsConfig(prefixes=(parent_of(url),), cache_bytes=sys.maxsize)
        try:
            lease = Places(config, place).hold(url, None)
        except SnapshotFault as exc:
            yield Report(Path(last_of(url)), None, None, (Fault.of(exc),))
            return
        try:
            yield admission.examine(lease.path)
        finally:
            lease.release()


def _try_out(found: Report, fleet: Path | None) -> Trial:
    from eval_service.engine.errors import BootFailed
    from eval_service.engine.trial import try_out
    from eval_service.fleet_config import EVAL_GROUP, GroupConfig, load_fleet

    assert found.manifest is not None
    config = load_fleet(fleet) if fleet is not None else None
    group = config.groups[EVAL_GROUP] if config is not None else GroupConfig(model=found.directory)
    overrides = config.overrides if config is not None else {}
    with scratch(Kind.DOCTOR) as place:
        log = place / "engine.log"
        try:
            return asyncio.run(try_out(found.directory, found.manifest, group, log=log, overrides=overrides))
        except BootFailed as exc:
            raise EvalfleetError(f"no engine of {fleet} starts, whatever the snapshot: {exc}") from exc


def _render(trial: Trial | None) -> str:
    if trial is None:
        return "engine: not tried; mend the faults first"
    if not trial.ok:
        told = [
            f"  engine: {fault.message}" + (f"\n      -> {fault.hint}" if fault.hint else "") for fault in trial.faults
        ]
        return "\n".join(["engine: 1 fault", *told])
    if trial.canary_diff is None:
        return f"engine: loads in {trial.load_s:.1f} s; unproven: its exporter left no canary to compare with"
    return f"engine: loads in {trial.load_s:.1f} s; the canary agrees to {trial.canary_diff:.2g} nats"


def _as_json(trial: Trial | None) -> dict[str, Any] | None:
    return None if trial is None else {"ok": trial.ok, **asdict(trial)}
