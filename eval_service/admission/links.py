"""Hard links to a checkpoint that is not ours to keep: its owner may remove it, and its bytes stay until we let go.

Pickles are left out: no engine opens them, and an optimizer's state may be most of a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval_service.admission.faults import Findings
from eval_service.admission.place import check_inside, list_files
from eval_service.contract.errors import SnapshotUnsafe
from eval_service.contract.snapshot import is_pickle
from eval_service.contract.wire import Source


@dataclass(frozen=True, slots=True)
class Linked:
    """What came of it: `directory` is where to read the checkpoint from; `why_not`, where it can't be held."""

    directory: Path
    why_not: str | None = None


def hold(directory: Path, links: Path, *, source: Source, roots: Sequence[Path]) -> Linked:
    """Link every file of a checkpoint into `links`, which is made if need be; one that is linked already stays.

    A checkpoint that is not there, or that the checks will refuse for its place, is left where it lies.
    """
    findings = Findings()
    try:
        place, root = check_inside(directory, roots)
        if not place.is_dir():
            return Linked(links if links.is_dir() else directory)
    except SnapshotUnsafe:
        return Linked(directory)
    files = list_files(place, root if source is Source.CALLER else place, findings)
    if findings:  # also where it is being removed while we look; what was linked before was sound then
        return Linked(links if links.is_dir() else directory)
    try:
        links.mkdir(parents=True, exist_ok=True)
        for name in files:
            if not is_pickle(name):
                _link((place / name).resolve(), links / name)
    except FileNotFoundError:  # it vanishes while we look: what is linked by now is checked
        return Linked(links)
    except OSError as exc:
        return Linked(directory, f"{directory} can't be held by hard links: {exc.strerror}")
    return Linked(links)


def _link(file: Path, link: Path) -> None:
    try:
        os.link(file, link)
    except FileExistsError:
        if not os.path.samefile(file, link):  # another file took its name since
            link.unlink()
            os.link(file, link)
