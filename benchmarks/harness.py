"""What every benchmark has: processes that end with it, rounds, and one report of figures and targets."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Mark:
    """One target: what was measured, what is to be reached; `ok` is None where a peer is absent."""

    value: float | None
    target: str
    ok: bool | None


def at_least(value: float | None, least: float) -> Mark:
    """A target that is reached from `least` on."""
    return Mark(None if value is None else round(value, 3), f">= {least:g}", None if value is None else value >= least)


def at_most(value: float | None, most: float) -> Mark:
    """A target that is reached up to `most`."""
    return Mark(None if value is None else round(value, 3), f"<= {most:g}", None if value is None else value <= most)


@dataclass(slots=True)
class Report:
    """What one benchmark found."""

    what: str
    versions: Mapping[str, str | None]
    counts: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    targets: dict[str, Mark] = field(default_factory=dict)

    def show(self, *, as_json: bool) -> int:
        """Print it; 1 if a target was missed."""
        if as_json:
            print(json.dumps(asdict(self)))
        else:
            print(self.what, dict(self.versions), self.counts, sep="\n")
            for name, figure in self.figures.items():
                print(f"{name:44} {figure}")
            for name, mark in self.targets.items():
                told = {True: "ok", False: "MISSED", None: "no peer"}[mark.ok]
                print(f"{told:8} {name:60} {mark.value} (target {mark.target})")
        return int(any(mark.ok is False for mark in self.targets.values()))


def arguments(what: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--quick", action="store_true", help="short rounds: does it run, not how fast is it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def versions_of(*packages: str) -> dict[str, str | None]:
    """Python's and those of packages; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


@contextmanager
def process(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended, with its children, when the block is left."""
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.DEVNULL, **options) as started:
        try:
            yield started
        finally:
            family = [started.pid, *(child.pid for child in _children(started.pid))]
            for pid in family:
                if psutil.pid_exists(pid):
                    psutil.Process(pid).kill()


@contextmanager
def telling_process(*argv: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A Python module as a process, and the first line that it prints, which says where it listens."""
    with process([sys.executable, "-m", *argv], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        line = started.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{argv[0]} ended before it listened")
        yield started, line


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children so far."""
    total = 0.0
    for member in [psutil.Process(pid), *_children(pid)]:
        times = member.cpu_times()
        total += times.user + times.system
    return total


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def _children(pid: int) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return found
