"""A replica as a process: `python -m tests.support.engine_replica MODEL GRADE LOG` prints its reports as JSON lines."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path

from eval_service.engine.protocol import Command, EngineReport
from eval_service.engine.runner import EngineRunner
from eval_service.engine.server import BootOptions
from eval_service.fleet_config import GroupConfig


class PrintingLink:
    """Prints each report, gives no commands."""

    async def poll(self, report: EngineReport) -> Command | None:
        """As the protocol says."""
        print(json.dumps(dataclasses.asdict(report)), flush=True)
        await asyncio.sleep(0.2)
        return None


async def main() -> None:
    """Run until killed."""
    model, grade, log = sys.argv[1:]
    group = GroupConfig.model_validate({"model": model, "grade": grade})
    options = BootOptions(log=Path(log))
    await EngineRunner("replica", "eval", group, node="here", options=options, link=PrintingLink()).run()


if __name__ == "__main__":
    asyncio.run(main())
