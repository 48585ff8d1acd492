"""What is looked at when all is over: the ledger's rows, the trainers' diaries, the samples, what lies in the runs'
roots, and which processes live. Gathered once; the promises are pure functions of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval_service.chaos.inject import Done
from eval_service.chaos.patron import Told
from eval_service.chaos.records import Everything
from eval_service.chaos.watch import Seen
from eval_service.chaos.world import World
from eval_service.contract import names
from eval_service.contract.errors import EvalfleetError
from eval_service.contract.states import PointState
from eval_service.contract.wire import SampleView
from eval_service.suites.samples import read_samples

_MAX_SAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that the promises are checked against."""

    world: World
    ledger: Everything
    diaries: Mapping[str, Sequence[dict[str, Any]]]  # by run
    samples: Mapping[str, Sequence[SampleView] | str]  # by done point; text says why there are none
    kept: Mapping[str, Sequence[str]]  # names of published directories, by run
    pinned: frozenset[str]  # digests of what engines hold, which stays with them
    scraps: Sequence[str]  # half-written or half-deleted paths
    faults: Sequence[Done]
    seen: Seen
    served: Told = field(default_factory=Told)
    unplanned: Sequence[str] = field(default_factory=list)  # faults of the list that never landed
    orphans: Sequence[str] = field(default_factory=list)
    undrained: Sequence[str] = field(default_factory=list)
    trainer_failures: Sequence[str] = field(default_factory=list)


def read_all_samples(points: Sequence[dict[str, Any]]) -> dict[str, Sequence[SampleView] | str]:
    """The samples of every done point."""
    found: dict[str, Sequence[SampleView] | str] = {}
    for point in points:
        if point["state"] == PointState.DONE:
            try:
                found[point["id"]] = read_samples(Path(point["samples_path"]), limit=_MAX_SAMPLES).samples
            except (EvalfleetError, OSError) as exc:
                found[point["id"]] = str(exc)
    return found


def kept_in(world: World, run: str) -> list[str]:
    """Names of a run's published directories."""
    return sorted(path.name for path in world.run_dir(run).glob("step_*") if names.parse_step_dir(path.name))


def scraps_in(world: World, run: str) -> list[str]:
    """What an ended process left half done in a run's directory."""
    directory = world.run_dir(run)
    hidden = [*directory.glob(".*"), *(directory / names.EVALS).glob(".*"), *(directory / names.OUTBOX).glob(".*")]
    return sorted(str(path) for path in hidden)


def to_keep(ledger: Everything, run: str, keep: int) -> set[str]:
    """The directories of a run that are to be left: the `keep` settled last, and the best of each suite so far."""
    rows = [row for row in ledger.snapshots if row["run"] == run]
    rows.sort(key=lambda row: (row["settled_at"] or float("inf"), row["step"], row["id"]), reverse=True)
    counts = [
        point
        for point in ledger.points
        if point["run"] == run and point["state"] == PointState.DONE and not point["superseded"]
    ]
    best: dict[str, dict[str, Any]] = {}
    for point in sorted(counts, key=lambda point: (point["score"], point["step"])):
        best[point["suite"]] = point
    wanted = {row["id"] for row in rows[:keep]} | {point["snapshot_id"] for point in best.values()}
    return {directory_of(row) for row in rows if row["id"] in wanted}


def digests_of(names_: Iterable[str]) -> dict[str, str]:
    """The first digits of the digest that each published directory is named by."""
    parsed = {name: names.parse_step_dir(name) for name in names_}
    return {name: found.digest8 for name, found in parsed.items() if found is not None}


def directory_of(snapshot: dict[str, Any]) -> str:
    """The name of a snapshot's directory."""
    return Path(snapshot["path"]).name
