"""What lies on shared storage and nobody has POSTed: published snapshots and the outbox.

Only reads. What is damaged is told, and stops nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from eval_service.contract import names
from eval_service.contract.errors import InvalidRequest
from eval_service.contract.manifest import validation_message
from eval_service.contract.outbox import Outbox
from eval_service.contract.plain_files import read_plain
from eval_service.contract.wire import DispatchRequest, Source
from eval_service.objects.urls import is_url

_MAX_BYTES = 4 << 20
_REQUESTS = TypeAdapter(tuple[DispatchRequest, ...])
_REQUEST = TypeAdapter(DispatchRequest)

Known = Callable[[DispatchRequest], bool]
"""Whether the ledger has this reservation with its snapshot, so that there is nothing to take in."""


@dataclass(frozen=True, slots=True)
class Found:
    """A request to take in, and the file that it came from."""

    request: DispatchRequest
    path: Path
    in_outbox: bool  # drop the file once the request is taken in


@dataclass(frozen=True, slots=True)
class Damaged:
    """A file that holds no request that could be taken in, and why."""

    path: Path
    message: str


@dataclass(slots=True)
class Scan:
    """What one look at a run's directory found."""

    found: list[Found] = field(default_factory=list)
    damaged: list[Damaged] = field(default_factory=list)
    sent: list[Path] = field(default_factory=list)  # outbox files whose request the ledger has: drop them


def scan_run(root: Path, run: str, known: Known) -> Scan:
    """Look for what the ledger lacks, lowest step first within the outbox and within the published ones.

    A reservation is found once: the outbox's request stands for the published one, since it says `deferred`.
    """
    scan = Scan()
    directory = names.run_dir(root, run)
    seen: set[str] = set()
    for path, request in _outbox_requests(directory, run, scan):
        if known(request):
            scan.sent.append(path)
        elif request.reservation not in seen:
            seen.add(request.reservation)
            scan.found.append(Found(request, path, in_outbox=True))
    for path, request in _published_requests(directory, run, scan):
        if request.reservation not in seen and not known(request):
            seen.add(request.reservation)
            scan.found.append(Found(request, path, in_outbox=False))
    return scan


def _outbox_requests(directory: Path, run: str, scan: Scan) -> list[tuple[Path, DispatchRequest]]:
    good = []
    for path in Outbox(directory / names.OUTBOX).files():
        try:
            request = _REQUEST.validate_json(_read(path))
            _check_outbox_request(request, directory, run)
        except (OSError, ValidationError, InvalidRequest) as exc:
            scan.damaged.append(Damaged(path, _why(exc)))
        else:
            good.append((path, request))
    return sorted(good, key=lambda item: (item[1].step, item[0].name))


def _published_requests(directory: Path, run: str, scan: Scan) -> Iterator[tuple[Path, DispatchRequest]]:
    for place, parsed in _published(directory):
        path = place / names.DISPATCH
        try:
            requests = _REQUESTS.validate_json(_read(path))
            for request in requests:
                _check_published_request(request, place, parsed, run)
        except (OSError, ValidationError, InvalidRequest) as exc:
            scan.damaged.append(Damaged(path, _why(exc)))
        else:
            yield from ((path, request) for request in requests)


def _published(directory: Path) -> list[tuple[Path, names.StepDir]]:
    """Complete snapshot directories, lowest step first; links are not looked into."""
    try:
        entries = list(directory.iterdir())
    except OSError:
        return []
    parsed = [(entry, step_dir) for entry in entries if (step_dir := names.parse_step_dir(entry.name))]
    complete = [
        item
        for item in parsed
        if not item[0].is_symlink() and item[0].is_dir() and (item[0] / names.COMPLETE).is_file()
    ]
    return sorted(complete, key=lambda item: item[1])


def _check_outbox_request(request: DispatchRequest, directory: Path, run: str) -> None:
    _check_run(request, run)
    if request.snapshot is None:
        raise InvalidRequest("names no snapshot", field="snapshot", hint="only exported snapshots wait in an outbox")
    if is_url(request.snapshot):
        return  # it is judged where it is taken in
    if request.source is Source.STAGING and _resolved(request.snapshot).parent != directory.resolve():
        raise InvalidRequest(f"{request.snapshot} is not of this run's directory", field="snapshot")


def _check_published_request(request: DispatchRequest, place: Path, parsed: names.StepDir, run: str) -> None:
    _check_run(request, run)
    if request.snapshot is None or _resolved(request.snapshot) != place.resolve():
        raise InvalidRequest(f"{request.snapshot} is not the directory that it lies in", field="snapshot")
    if request.step != parsed.step:
        raise InvalidRequest(f"{request.step} is not the directory's step", field="step")
    if request.digest is None or request.digest[:8] != parsed.digest8:
        raise InvalidRequest(f"{request.digest} is not the directory's digest", field="digest")
    if request.source is Source.CALLER:
        raise InvalidRequest("a published export is no caller's", field="source")


def _check_run(request: DispatchRequest, run: str) -> None:
    if request.run != run:
        raise InvalidRequest(f"{request.run!r} is not the run {run!r} in whose directory it lies", field="run")


def _resolved(snapshot: str) -> Path:
    try:
        return Path(snapshot).resolve()
    except (OSError, RuntimeError, ValueError) as exc:
        raise InvalidRequest(f"{snapshot!r} can't be resolved: {exc}", field="snapshot") from exc


def _read(path: Path) -> bytes:
    if path.is_symlink() or not path.is_file():
        raise InvalidRequest("is not there, or no plain file")
    if path.stat().st_size > _MAX_BYTES:
        raise InvalidRequest(f"has more than {_MAX_BYTES} bytes")
    return read_plain(path)


def _why(exc: OSError | ValidationError | InvalidRequest) -> str:
    return validation_message(exc) if isinstance(exc, ValidationError) else str(exc)
