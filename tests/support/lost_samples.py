"""A controller that is killed between the samples' file and the ledger."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from eval_service.contract.wire import SampleView
from eval_service.suites.samples import write_samples


def killed_once_written(written: list[Path]) -> Callable[..., int]:
    """In the place of `write_samples`: the first attempt ends once its file is there. `written` gets every file."""

    def write(path: Path, samples: Iterable[SampleView], **more: Any) -> int:
        count = write_samples(path, samples, **more)
        written.append(path)
        if len(written) == 1:
            raise OSError(errno.EIO, "killed here")
        return count

    return write
