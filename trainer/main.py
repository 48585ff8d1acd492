"""`evalfleet-train --config run.toml [--set section.key=value ...] [--plan]`.

Exit codes: 0 the run ended; 1 an exception ended it; 2 what was asked can't work; 143 SIGTERM ended it early.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eval_service.contract.errors import ConfigError
from trainer.config import load_run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        config = load_run(args.config, args.set)
        # Here and not above: a mistake in the file is told before torch and megatron are loaded.
        from trainer.session import prepare, run

        prepared = prepare(config)
        print(prepared.description, flush=True)
        return 0 if args.plan else run(prepared)
    except ConfigError as exc:
        print(f"evalfleet-train: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evalfleet-train", description="Supervised fine-tuning, evaluated as it goes."
    )
    parser.add_argument("--config", type=Path, required=True, metavar="run.toml")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="section.key=value",
        help="override a setting (a TOML value, else a string; `none` unsets it); may be repeated",
    )
    parser.add_argument("--plan", action="store_true", help="print the resolved settings and the plan, and end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
