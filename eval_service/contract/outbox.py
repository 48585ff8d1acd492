"""What a trainer could not send, kept on shared storage until it, or the service's scan, sends it.

`<root>/<run>/outbox/<reservation>.json` holds one dispatch request; it is written beside and renamed, so a reader sees
all of it or nothing. `receipt.json` is the receipt of a drain that the service could not answer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from eval_service.contract import names
from eval_service.contract.plain_files import read_plain
from eval_service.contract.wire import DispatchRequest, Receipt


@dataclass(frozen=True, slots=True)
class Outbox:
    """The outbox of one run."""

    directory: Path

    @classmethod
    def of(cls, root: str | Path, run: str) -> Outbox:
        """The outbox of a run under its root."""
        return cls(names.outbox_dir(root, run))

    def put(self, request: DispatchRequest) -> Path:
        """Keep a request; the same reservation replaces what was kept."""
        return self._write(f"{request.reservation}.json", request.model_dump_json())

    def pending(self) -> Iterator[tuple[Path, DispatchRequest]]:
        """What is kept, oldest step first. A file that is no request is left where it is."""
        found = []
        for path in self.files():
            try:
                found.append((path, DispatchRequest.model_validate_json(read_plain(path))))
            except (OSError, ValidationError):
                continue
        yield from sorted(found, key=lambda item: (item[1].step, item[0].name))

    def unreadable(self) -> list[Path]:
        """Files that are no request, for a warning."""
        readable = {path for path, _ in self.pending()}
        return [path for path in self.files() if path not in readable]

    def drop(self, path: Path) -> None:
        """It was sent."""
        path.unlink(missing_ok=True)

    def put_receipt(self, receipt: Receipt) -> Path:
        """Keep the receipt of a drain that could not be had."""
        return self._write(names.RECEIPT, receipt.model_dump_json(indent=1))

    def files(self) -> list[Path]:
        """The files that hold, or should hold, a request."""
        if not self.directory.is_dir():
            return []
        return sorted(path for path in self.directory.glob("*.json") if path.name != names.RECEIPT)

    def _write(self, name: str, text: str) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / name
        beside = self.directory / names.beside(name)
        try:
            with beside.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        return path
