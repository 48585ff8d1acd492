"""torchrun, with an exit code that says more: that of the first rank that failed, instead of 1.

`python -m trainer.ranks --nproc-per-node 2 -m trainer.main --config run.toml`; all options are torchrun's.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks and wait; a signal's number is told as a shell tells it, 128 + n."""
    args = run.parse_args(list(sys.argv[1:] if argv is None else argv))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    try:
        with tempfile.TemporaryDirectory(prefix="torchelastic_") as directory:  # torchrun would make it, and leave it
            args.log_dir = args.log_dir or directory
            run.run(args)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except ChildFailedError as exc:
        code = exc.get_first_failure()[1].exitcode
        return code if code >= 0 else 128 - code
    except SignalException as exc:
        return 128 + int(exc.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
