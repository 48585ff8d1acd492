"""Whether a checkpoint is complete: its marker is there, or nothing has changed for a while and the checks pass.

Only looks. What is read (the checks read every byte once) counts only if nothing changed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from eval_service.admission.checks import Report, find_faults
from eval_service.contract.wire import Source

ANYWHERE = (Path("/"),)  # the service holds a snapshot against its own roots


@dataclass(frozen=True, slots=True)
class Rule:
    """A marker's name, or seconds without a change."""

    marker: str | None = None
    quiet_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Look:
    """A directory's files as they were: equal looks, nothing changed. `changed_at` is Unix seconds."""

    mark: str
    changed_at: float


@dataclass(frozen=True, slots=True)
class Complete:
    """It may be evaluated; `digest` is None where the marker is there and the checks find a fault."""

    digest: str | None
    mark: str


@dataclass(frozen=True, slots=True)
class Incomplete:
    """Not yet. `settled`: nothing has changed for the rule's while, so it may stay so."""

    why: str
    settled: bool


def look_at(directory: Path) -> Look:
    """Names, sizes and times of a directory's files.

    Raises:
        OSError: it, or a file of it, is gone.
    """
    state, newest = xxhash.xxh3_128(), _changed(directory)
    for path in sorted(directory.iterdir()):
        info = path.stat() if path.exists() else path.lstat()  # a link to nothing: the checks name it
        newest = max(newest, info.st_mtime, info.st_ctime)
        state.update(f"{path.name}\0{info.st_size}\0{info.st_mtime_ns}\0{info.st_ino}\n".encode())
    return Look(state.hexdigest(), newest)


def _changed(path: Path) -> float:
    info = path.stat()
    return max(info.st_mtime, info.st_ctime)


def examine(directory: Path) -> Report:
    """The admission checks; where to and whose code are the service's to judge."""
    return find_faults(directory, source=Source.CALLER, roots=ANYWHERE, allow_auto_map=True)


@dataclass(slots=True)
class Checkpoint:
    """What is known of one directory over several looks.

    Args:
        now: Unix seconds.
        monotonic: for what was seen here; clocks of other machines may be wrong.
    """

    directory: Path
    now: Callable[[], float]
    monotonic: Callable[[], float]
    check: Callable[[Path], Report] = examine
    last: Look | None = None
    since: float = 0.0
    checked: tuple[str, str | None, str] = field(default=("", None, ""))  # mark, digest, fault

    def judge(self, rule: Rule) -> Complete | Incomplete:
        """Look once, and read it if it seems complete and was not read yet."""
        try:
            seen = self.look()
            quiet = self._quiet(seen, rule)
            if rule.marker is not None and not (self.directory / rule.marker).exists():
                return Incomplete(f"no {rule.marker} in it", settled=quiet)
            if rule.marker is None and not quiet:
                return Incomplete(f"still changing, or for less than {rule.quiet_s:g} s not", settled=False)
            digest, fault = self._read(seen)
        except OSError as exc:
            return Incomplete(f"can't be read: {exc}", settled=not self.directory.exists())
        if self.checked[0] != seen.mark:
            return Incomplete("changed while it was read", settled=False)
        if rule.marker is None and fault:
            return Incomplete(fault, settled=True)
        return Complete(digest, seen.mark)

    def look(self) -> Look:
        """Look, and note since when it has been like this.

        Raises:
            OSError: it, or a file of it, is gone.
        """
        seen = look_at(self.directory)
        if self.last is None or self.last.mark != seen.mark:
            self.last, self.since = seen, self.monotonic()
        return seen

    def _quiet(self, seen: Look, rule: Rule) -> bool:
        return max(self.monotonic() - self.since, self.now() - seen.changed_at) >= rule.quiet_s

    def _read(self, seen: Look) -> tuple[str | None, str]:
        if self.checked[0] != seen.mark:
            report = self.check(self.directory)
            fault = ""
            if report.faults:
                more = f"; and {len(report.faults) - 1} more" if len(report.faults) > 1 else ""
                fault = f"{report.faults[0].field}: {report.faults[0].message}{more}"
            digest = report.manifest.digest if report.manifest is not None and not fault else None
            # What changed meanwhile may have been read before it did: then this was of no content that ever was there.
            mark = seen.mark if look_at(self.directory).mark == seen.mark else ""
            self.checked = (mark, digest, fault)
        return self.checked[1], self.checked[2]
