"""What the service allows: the suites that it has, paths inside its roots, and URLs under its object prefixes.

A path is judged as it is written, without a call to the file system: one that hangs would hang whoever asks. Where it
is loaded its links are followed and it is judged again. One that isn't inside as it is written may be so once its links
are followed (a root that is named through a link); only to find that out is the file system asked.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval_service.contract.errors import InvalidRequest
from eval_service.fleet_config import FleetConfig
from eval_service.objects.urls import check_admitted, is_url


@dataclass(frozen=True, slots=True)
class Bounds:
    """Roots for snapshots, links in them followed, and the suites."""

    roots: tuple[Path, ...]
    suites: Collection[str]
    functions: frozenset[str] = frozenset()  # those of the suites that are checkpoint eval functions
    objects: tuple[str, ...] = ()  # prefixes of URLs that snapshots may have

    @classmethod
    def of(cls, fleet: FleetConfig, suites: Collection[str], functions: frozenset[str]) -> Bounds:
        """As the fleet's file has them."""
        objects = fleet.objects.prefixes if fleet.objects is not None else ()
        return cls(fleet.service.roots, suites, functions, objects)

    def check_suites(self, suites: Sequence[str]) -> None:
        """Refuse a suite that the service does not have.

        Raises:
            InvalidRequest: names it.
        """
        for suite in suites:
            if suite not in self.suites:
                known = ", ".join(sorted(self.suites))
                raise InvalidRequest(f"no suite {suite!r}", field="suites", hint=f"the service has: {known}")

    def check_kinds(self, suites: Collection[str]) -> None:
        """Refuse a checkpoint eval function beside a suite that engines evaluate, in one run.

        Raises:
            InvalidRequest: names one of each.
        """
        own, engines = sorted(self.functions & set(suites)), sorted(set(suites) - self.functions)
        if own and engines:
            raise InvalidRequest(
                f"{own[0]!r} is a checkpoint eval function and {engines[0]!r} is evaluated by engines",
                field="suites",
                hint="a run has suites of one of the two; give each a run of its own",
            )

    def as_written(self, path: str, field: str) -> str | None:
        """The path, if it lies inside a root as it is written; None: that can't be told without the file system.

        Raises:
            InvalidRequest: it is no absolute path, or a URL under none of the prefixes.
        """
        if is_url(path) and field == "snapshot":
            return check_admitted(path, self.objects, field)
        if "\0" in path or not os.path.isabs(path):
            raise InvalidRequest(f"{path!r} is no absolute path", field=field)
        if ".." in path.split(os.sep):  # after a link it leads elsewhere than it seems to
            return None
        written = os.path.normpath(path)
        return written if any(_lies_in(written, str(root)) for root in self.roots) else None

    def followed(self, path: str, field: str) -> str:
        """The path with its links followed; blocks for as long as the file system does.

        Raises:
            InvalidRequest: it lies outside the roots, or can't be followed.
        """
        try:
            resolved = str(Path(path).resolve())
        except (OSError, RuntimeError, ValueError) as exc:  # a loop of links, or a name that can't be one
            raise InvalidRequest(f"{path!r} can't be resolved", field=field) from exc
        if not any(_lies_in(resolved, str(root)) for root in self.roots):
            raise InvalidRequest(
                f"{path} lies outside the service's roots",
                field=field,
                hint="put it under one of service.roots in fleet.toml, or add its directory there",
            )
        return resolved


def _lies_in(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)
