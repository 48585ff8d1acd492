"""`evalfleet-train --config run.toml [--set section.key=value ...] [--plan [--json]]`.

Exit codes: 0 the run ended; 1 an exception ended it; 2 what was asked can't work; 143 SIGTERM ended it early.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from eval_service.contract.errors import ConfigError
from trainer.config import RunConfig, load_run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    args = parser().parse_args(argv)
    try:
        config = load_run(args.config, args.set, args.fleet)
        return _plan(config, as_json=args.json) if args.plan else _train(config)
    except ConfigError as exc:
        print(f"evalfleet-train: {exc}", file=sys.stderr)
        if args.json:
            print(exc.envelope().model_dump_json())
        return 2
    except KeyboardInterrupt:
        return 130


def _train(config: RunConfig) -> int:
    # Here and not above: a mistake in the file is told before torch and megatron are loaded.
    from trainer.session import prepare, run

    prepared = prepare(config)
    if os.environ.get("RANK", "0") == "0":
        print(prepared.description, flush=True)
    return run(prepared)


def _plan(config: RunConfig, *, as_json: bool) -> int:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):  # torchrun would say it
        os.environ.setdefault(name, str(config.parallel.ranks))
    from trainer.session import prepare

    prepared = prepare(config)
    print(json.dumps(prepared.facts) if as_json else prepared.description, flush=True)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="evalfleet-train", description="Supervised fine-tuning, evaluated as it goes.")
    made.add_argument("--config", type=Path, required=True, metavar="run.toml", help="the run file")
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="section.key=value",
        help="override a setting (a TOML value, else a string; `none` unsets it); may be repeated",
    )
    made.add_argument("--plan", action="store_true", help="print the resolved settings and the plan, and end")
    made.add_argument("--json", action="store_true", help="with --plan: one JSON object, for programs")
    made.add_argument("--fleet", type=json.loads, metavar="JSON", help="what a launch knows of the fleet")
    return made


if __name__ == "__main__":
    sys.exit(main())
